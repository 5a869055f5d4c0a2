// Sixteen fp32 lanes, written with GCC vector extensions: one source for SSE2, AVX2 and AVX-512, and, because nothing
// is contracted or reordered (-ffp-contract=off), the same bits on all of them. Tails run through the same lanes,
// padded, so that an element's bits never depend on where it stands.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../operator.h"

namespace kdtree {

constexpr int kLanes = 16;
using F32x16 = float __attribute__((vector_size(64)));
using I32x16 = int32_t __attribute__((vector_size(64)));
using U32x16 = uint32_t __attribute__((vector_size(64)));
using U16x16 = uint16_t __attribute__((vector_size(32)));

#define KDTREE_INLINE inline __attribute__((always_inline))

// bf16 storage; arithmetic is always fp32.
struct BFloat16 {
  uint16_t bits;
};

KDTREE_INLINE float to_float(float x) { return x; }
KDTREE_INLINE float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest, ties to even; NaN stays NaN.
KDTREE_INLINE BFloat16 to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

KDTREE_INLINE void store(float* to, float x) { *to = x; }
KDTREE_INLINE void store(BFloat16* to, float x) { *to = to_bfloat16(x); }

KDTREE_INLINE F32x16 splat(float x) { return F32x16{} + x; }

KDTREE_INLINE F32x16 load(const float* from) {
  F32x16 x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
KDTREE_INLINE F32x16 load(const BFloat16* from) {
  U16x16 bits;
  std::memcpy(&bits, from, sizeof bits);
  const U32x16 wide = __builtin_convertvector(bits, U32x16) << 16;
  F32x16 x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}
// The first `count` lanes; the others are 0.
template <class T>
KDTREE_INLINE F32x16 load_partial(const T* from, int64_t count) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(T));
  return load(lanes);
}

template <class T>
KDTREE_INLINE void store(T* to, F32x16 x, int64_t count = kLanes) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int64_t i = 0; i < count; ++i) store(to + i, lanes[i]);
}

// Lanes are added in halves: (i, i+8), (i, i+4), (i, i+2), (i, i+1).
KDTREE_INLINE float sum(F32x16 x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <class A, class B>
KDTREE_INLINE float dot(const A* a, const B* b, int64_t n) {
  F32x16 acc = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) acc += load(a + i) * load(b + i);
  if (i < n) acc += load_partial(a + i, n - i) * load_partial(b + i, n - i);
  return sum(acc);
}

// exp(x) to about 1 ulp: 2^n · p(r), r = x − n·ln 2 in [−ln2/2, ln2/2] (ln 2 in two parts, after Cody and Waite), p the
// Taylor polynomial of degree 7. Below −87.33 the result is 0 (no subnormals), above 88.72 it is inf; NaN stays.
KDTREE_INLINE F32x16 exp(F32x16 x) {
  const F32x16 low = splat(-87.33f), high = splat(88.72f);
  const I32x16 too_low = x < low, too_high = x > high;
  const I32x16 inside = ~(too_low | too_high);
  F32x16 y = reinterpret_cast<F32x16>(reinterpret_cast<I32x16>(x) & inside);
  const F32x16 magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to the nearest integer
  const F32x16 n = (y * splat(1.44269504f) + magic) - magic;
  const F32x16 r = (y - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  F32x16 p = splat(1.0f / 5040);
  p = p * r + splat(1.0f / 720);
  p = p * r + splat(1.0f / 120);
  p = p * r + splat(1.0f / 24);
  p = p * r + splat(1.0f / 6);
  p = p * r + splat(0.5f);
  p = (p * r) * r + r + splat(1.0f);
  // 2^n in two factors, so that n = 128 does not overflow on the way.
  const I32x16 exponent = __builtin_convertvector(n, I32x16);
  const I32x16 half = exponent >> 1;
  const F32x16 first = reinterpret_cast<F32x16>((half + 127) << 23);
  const F32x16 second = reinterpret_cast<F32x16>((exponent - half + 127) << 23);
  const F32x16 inner = p * first * second;
  const I32x16 infinity = reinterpret_cast<I32x16>(splat(__builtin_inff()));
  const I32x16 bits = (reinterpret_cast<I32x16>(inner) & inside) | (infinity & too_high);
  return reinterpret_cast<F32x16>(bits);
}

KDTREE_INLINE F32x16 sigmoid(F32x16 x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

// Calls f with a null pointer of the element type that `type` names.
template <class F>
KDTREE_INLINE auto with_type(int32_t type, F&& f) {
  return type == kBFloat16 ? f(static_cast<BFloat16*>(nullptr)) : f(static_cast<float*>(nullptr));
}

}  // namespace kdtree
