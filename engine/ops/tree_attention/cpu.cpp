#include "../cpu/operator_cpu.h"
#include "../cpu/threads.h"
#include "op.h"

#include <cmath>

namespace kdtree::KDTREE_PATH {
namespace {

constexpr int64_t kKeyBlock = 64;  // keys of one partial sum of the output
constexpr int64_t kHeads = 8;      // of one job: they read a block of keys while it is in the cache

// Heads × keys, or heads × sixteens of the output, whose sums fit the registers beside their operands.
constexpr int kHeadsAtOnce = kParts == 1 ? 4 : kParts == 2 ? 2 : 1;
constexpr int kKeysAtOnce = kParts == 1 ? 4 : 2;
constexpr int kSixteensAtOnce = kKeysAtOnce;

// What one thread needs for one job.
struct Scratch {
  int64_t score_stride;
  int32_t* path;  // [max_rows]: the row's ancestors in the tree by depth, then itself
  float* q;       // [kHeads][width]: latent, then rope
  float* scores;  // [kHeads][score_stride]; later the softmax's numerators
  float* total;   // [kHeads][kv_lora_rank]

  Scratch(const TreeAttentionShape& shape, void* workspace, int thread) {
    score_stride = padded(shape.max_keys);
    q = reinterpret_cast<float*>(static_cast<char*>(workspace) + static_cast<size_t>(thread) * bytes(shape));
    scores = q + kHeads * padded(shape.kv_lora_rank + shape.rope_dim);
    total = scores + kHeads * score_stride;
    path = reinterpret_cast<int32_t*>(total + kHeads * padded(shape.kv_lora_rank));
  }
  static int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
  static size_t bytes(const TreeAttentionShape& shape) {
    return 4 * static_cast<size_t>(kHeads * (padded(shape.kv_lora_rank + shape.rope_dim) + padded(shape.max_keys) +
                                             padded(shape.kv_lora_rank)) +
                                   padded(shape.max_rows));
  }
};

// The keys of one row, by position: the prefix, then the row's path through the tree.
template <class T>
struct Keys {
  const T* kv;
  const int32_t* path;
  int64_t prefix, count, width;

  KDTREE_INLINE const T* operator[](int64_t j) const { return kv + (j < prefix ? j : prefix + path[j - prefix]) * width; }
};

template <class T>
Keys<T> keys_of(const TreeAttentionShape& shape, const TreeAttentionArgs& args, int64_t row, int32_t* path) {
  const int32_t depth = args.depths[row];
  int32_t node = static_cast<int32_t>(row);
  for (int32_t d = depth; d >= 0; --d, node = args.parents[node]) path[d] = node;
  return {static_cast<const T*>(args.kv), path, *args.prefix, int64_t{*args.prefix} + depth + 1,
          int64_t{shape.kv_lora_rank} + shape.rope_dim};
}

// scores[h][j] = (q[h] · key j) · scale.
template <int heads, int n_keys, class T>
KDTREE_INLINE void score(const float* q, const Keys<T>& keys, int64_t first, float scale, float* scores, int64_t stride) {
  const T* key[n_keys];
  for (int j = 0; j < n_keys; ++j) key[j] = keys[first + j];
  F32x16 sums[heads][n_keys] = {};
  each_sixteen(keys.width, [&](int64_t c, int64_t lanes) {
    F32x16 k[n_keys];
#pragma GCC unroll 8
    for (int j = 0; j < n_keys; ++j) k[j] = load(key[j] + c, lanes);
#pragma GCC unroll 8
    for (int h = 0; h < heads; ++h) {
      const F32x16 in = load(q + h * keys.width + c, lanes);
#pragma GCC unroll 8
      for (int j = 0; j < n_keys; ++j) sums[h][j] = fma(in, k[j], sums[h][j]);
    }
  });
  for (int h = 0; h < heads; ++h)
    for (int j = 0; j < n_keys; ++j) scores[h * stride + first + j] = sum(sums[h][j]) * scale;
}

// total[h][c] += sum of p[h][j] · key j [c] over the keys begin … end - 1, for some heads and n · 16 columns.
template <int heads, int n, class T>
KDTREE_INLINE void weigh(const float* p, int64_t stride, const Keys<T>& keys, int64_t begin, int64_t end, int64_t column,
                         int64_t lanes, float* total, int64_t rank) {
  F32x16 sums[heads][n] = {};
  for (int64_t j = begin; j < end; ++j) {
    F32x16 k[n];
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) k[i] = load(keys[j] + column + i * kLanes, lanes);
#pragma GCC unroll 8
    for (int h = 0; h < heads; ++h) {
      const F32x16 weight = splat(p[h * stride + j]);
#pragma GCC unroll 8
      for (int i = 0; i < n; ++i) sums[h][i] = fma(weight, k[i], sums[h][i]);
    }
  }
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < n; ++i) {
      float* to = total + h * rank + column + i * kLanes;
      store(to, load(to, lanes) + sums[h][i], lanes);
    }
}

// f(first, step) with constant steps: `step` at once as long as that many are left, then one at a time.
template <int step, class F>
KDTREE_INLINE void in_steps(int64_t begin, int64_t end, F&& f) {
  for (; begin + step <= end; begin += step) f(begin, std::integral_constant<int, step>());
  for (; begin < end; ++begin) f(begin, std::integral_constant<int, 1>());
}

// The softmax's numerators in place of the scores; returns their sum.
float softmax(float* scores, int64_t count) {
  F32x16 largest = splat(-INFINITY), total = {};
  std::fill(scores + count, scores + Scratch::padded(count), -INFINITY);  // weigh 0
  for (int64_t j = 0; j < count; j += kLanes) largest = larger(largest, load(scores + j));
  const F32x16 top = splat(max_of(largest));
  for (int64_t j = 0; j < count; j += kLanes) {
    const F32x16 p = exp(load(scores + j) - top);
    store(scores + j, p);
    total = total + p;
  }
  return sum(total);
}

template <class T>
void attend(const TreeAttentionShape& shape, const TreeAttentionArgs& args, int64_t row, int64_t first_head,
            const Scratch& scratch) {
  const int64_t rank = shape.kv_lora_rank, heads = std::min(kHeads, shape.heads - first_head);
  const Keys<T> keys = keys_of<T>(shape, args, row, scratch.path);
  for (int64_t h = 0; h < heads; ++h) {
    float* q = scratch.q + h * keys.width;
    convert(static_cast<const T*>(args.q_latent) + (row * shape.heads + first_head + h) * rank, q, rank);
    convert(static_cast<const T*>(args.q_rope) + row * shape.q_rope_row_stride +
                (first_head + h) * shape.q_rope_head_stride,
            q + rank, shape.rope_dim);
  }
  for (int64_t begin = 0; begin < keys.count; begin += kKeyBlock)
    in_steps<kHeadsAtOnce>(0, heads, [&](int64_t h, auto n_heads) {
      in_steps<kKeysAtOnce>(begin, std::min(begin + kKeyBlock, keys.count), [&](int64_t j, auto n_keys) {
        score<n_heads, n_keys>(scratch.q + h * keys.width, keys, j, shape.softmax_scale,
                               scratch.scores + h * scratch.score_stride, scratch.score_stride);
      });
    });
  float inverse[kHeads];
  for (int64_t h = 0; h < heads; ++h)
    inverse[h] = 1.0f / softmax(scratch.scores + h * scratch.score_stride, keys.count);

  std::fill_n(scratch.total, heads * rank, 0.0f);
  for (int64_t begin = 0; begin < keys.count; begin += kKeyBlock) {
    const int64_t end = std::min(begin + kKeyBlock, keys.count);
    in_steps<kHeadsAtOnce>(0, heads, [&](int64_t h, auto n_heads) {
      const float* p = scratch.scores + h * scratch.score_stride;
      float* total = scratch.total + h * rank;
      const int64_t whole = rank / kLanes;
      in_steps<kSixteensAtOnce>(0, whole, [&](int64_t i, auto n) {
        weigh<n_heads, n>(p, scratch.score_stride, keys, begin, end, i * kLanes, kLanes, total, rank);
      });
      if (rank % kLanes)
        weigh<n_heads, 1>(p, scratch.score_stride, keys, begin, end, whole * kLanes, rank % kLanes, total, rank);
    });
  }
  for (int64_t h = 0; h < heads; ++h) {
    const float* total = scratch.total + h * rank;
    T* y = static_cast<T*>(args.y) + (row * shape.heads + first_head + h) * rank;
    each_sixteen(rank, [&](int64_t c, int64_t lanes) {
      store(y + c, load(total + c, lanes) * splat(inverse[h]), lanes);
    });
  }
}

size_t workspace(const TreeAttentionShape& shape) {
  return Scratch::bytes(shape) * static_cast<size_t>(most_threads());
}

void run(const TreeAttentionShape& shape, const TreeAttentionArgs& args, void* workspace) {
  const int64_t rows = *args.n_rows, groups = (shape.heads + kHeads - 1) / kHeads;
  const int64_t per_key = int64_t{2} * shape.kv_lora_rank + shape.rope_dim;
  with_type(shape.type, [&](auto* type) {
    for_each_job(rows * groups, rows * shape.heads * (*args.prefix + 1) * per_key, [&](int64_t job) {
      attend<std::remove_pointer_t<decltype(type)>>(shape, args, job / groups, job % groups * kHeads,
                                                    Scratch(shape, workspace, omp_get_thread_num()));
    });
  });
}

}  // namespace

KDTREE_OPERATOR(tree_attention) = {"tree_attention",
                                   accept_any,
                                   no_bytes,
                                   nullptr,
                                   bytes_as<TreeAttentionShape, workspace>,
                                   run_as<TreeAttentionShape, TreeAttentionArgs, run>};

}  // namespace kdtree::KDTREE_PATH
