// The random numbers of scripted drafters: a hash, so that every backend and the reference draw the same ones.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define KDTREE_HOST_DEVICE __host__ __device__
#else
#define KDTREE_HOST_DEVICE
#endif

namespace kdtree {

struct ScriptHash {
  uint64_t key;

  KDTREE_HOST_DEVICE ScriptHash(int64_t seed, int64_t position, int64_t level)
      : key(static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(position) * 0xBF58476D1CE4E5B9u +
            static_cast<uint64_t>(level) * 0x94D049BB133111EBu) {}

  // The finaliser of splitmix64. Tokens are ≥ 0; −1 … −8 draw a level's other choices.
  KDTREE_HOST_DEVICE uint64_t bits(int64_t token) const {
    uint64_t z = key + static_cast<uint64_t>(token + 8) * 0xD6E8FEB86659FD93u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // In [0, 1), 24 bits: exact in fp32.
  KDTREE_HOST_DEVICE float uniform(int64_t token) const {
    return static_cast<float>(bits(token) >> 40) * (1.0f / 16777216.0f);
  }
};

}  // namespace kdtree
