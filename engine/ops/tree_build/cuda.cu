// Three launches, nothing on the host.
//
//   groups   Token t of a level belongs to group t mod groups. Every group's best key, and every block's maximum and sum
//            of exponentials in double. One pass over the logits: the floor is 4 · levels · vocab bytes.
//   select   A block a level. The top_k best groups hold the top_k best tokens; the tokens of these groups that are not
//            below the worst of their bests are the candidates, few more than top_k; ranking them by counting gives the
//            top-k, and the blocks' sums its log-probs.
//   grow     One warp. A row's children are popped in rank order, so the frontier is one entry a row: its next child.
//            Lane r mod 32 keeps row r's entry in registers; a pop is a warp-wide maximum.
//
// A key (numbers.cuh) is a logit and its token in one integer, so there are no ties: a level of equal logits is as
// cheap as any. A rank tuple is a bit string that orders as the tuple does: `path_code`.
#include "../cuda/numbers.cuh"
#include "../cuda/operator.cuh"
#include "../cuda/reduce.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kMaxBudget = 512;

// ---- groups ----------------------------------------------------------------------------------------------------------
constexpr int kGroupsOfBlock = 64;
constexpr int kTokensAtOnce = 4;  // of a group, by threads of a block
constexpr int kGroupThreads = kGroupsOfBlock * kTokensAtOnce;

// 16 groups or more for one wanted token: then few groups hold two of the best.
int groups_of(const TreeBuildShape& shape) { return shape.top_k <= 128 ? 2048 : 8192; }

struct Scratch {
  uint64_t* best;   // [levels, groups]
  double* sums;     // [levels, groups / kGroupsOfBlock]: of exp(logit − maximum)
  float* maxima;    // [levels, groups / kGroupsOfBlock]
  float* log_probs;  // [levels, top_k]
  int32_t* tokens;  // [levels, top_k]

  Scratch(const TreeBuildShape& shape, const TreeBuildArgs& args, void* workspace) {
    const int64_t groups = int64_t{shape.levels} * groups_of(shape), blocks = groups / kGroupsOfBlock;
    best = static_cast<uint64_t*>(workspace);
    sums = reinterpret_cast<double*>(best + groups);
    maxima = reinterpret_cast<float*>(sums + blocks);
    log_probs = maxima + blocks;
    tokens = reinterpret_cast<int32_t*>(log_probs + int64_t{shape.levels} * shape.top_k);
    if (args.top_log_probs) log_probs = args.top_log_probs;
    if (args.top_tokens) tokens = args.top_tokens;
  }
  static size_t bytes(const TreeBuildShape& shape) {
    const int64_t groups = int64_t{shape.levels} * groups_of(shape), blocks = groups / kGroupsOfBlock;
    return static_cast<size_t>(8 * groups + 12 * blocks + 8 * int64_t{shape.levels} * shape.top_k);
  }
};

__global__ void __launch_bounds__(kGroupThreads)
    groups(const float* all_logits, const int32_t* done, int vocab, int n_groups, Scratch scratch) {
  if (*done) return;
  const int level = static_cast<int>(blockIdx.y), block = static_cast<int>(blockIdx.x);
  const float* logits = all_logits + int64_t{level} * vocab;
  const int group = block * kGroupsOfBlock + static_cast<int>(threadIdx.x) % kGroupsOfBlock;
  const int part = static_cast<int>(threadIdx.x) / kGroupsOfBlock;
  const int first = group + part * n_groups, step = kTokensAtOnce * n_groups;

  uint64_t best = 0;
#pragma unroll 8
  for (int t = first; t < vocab; t += step) best = max(best, key_of(logits[t], t));
  __shared__ uint64_t best_of_part[kGroupThreads];
  best_of_part[threadIdx.x] = best;
  const float largest = block_reduce(best ? value_of(static_cast<uint32_t>(best >> 32)) : -INFINITY, -INFINITY, Max());
  if (part == 0) {
    for (int p = 1; p < kTokensAtOnce; ++p) best = max(best, best_of_part[threadIdx.x + p * kGroupsOfBlock]);
    scratch.best[int64_t{level} * n_groups + group] = best;
  }

  double sum = 0;
#pragma unroll 8
  for (int t = first; t < vocab; t += step) {
    const float logit = logits[t];
    if (logit != -INFINITY) sum += exp(static_cast<double>(logit) - largest);  // NaN where the level has one
  }
  sum = block_reduce(sum, 0.0, Add());
  if (threadIdx.x == 0) {
    scratch.sums[level * gridDim.x + block] = sum;
    scratch.maxima[level * gridDim.x + block] = largest;
  }
}

// ---- select ----------------------------------------------------------------------------------------------------------
constexpr int kSelectThreads = 1024;
constexpr int kMaxCandidates = 1024;  // ranked by counting; a thread each
constexpr int kMaxTokensOfThread = 16;  // of the best groups

// The largest threshold that at least k of the block's keys reach: exactly k, as keys differ (0 is no key).
template <int N>
__device__ uint64_t threshold(const uint64_t (&keys)[N], int k) {
  uint64_t threshold = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t higher = threshold | uint64_t{1} << bit;
    int count = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) count += __syncthreads_count(keys[i] >= higher);
    if (count >= k) threshold = higher;
    if (count == k) break;
  }
  return threshold;
}

template <int kGroupsOfThread>
__global__ void __launch_bounds__(kSelectThreads)
    select(const float* all_logits, const int32_t* done, int vocab, int top_k, Scratch scratch) {
  if (*done) return;
  constexpr int n_groups = kGroupsOfThread * kSelectThreads, blocks = n_groups / kGroupsOfBlock;
  __shared__ int chosen_groups[kMaxBudget], n_chosen, n_candidates;
  __shared__ uint64_t candidates[kMaxCandidates];
  __shared__ double log_z;
  const int64_t level = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const float* logits = all_logits + level * vocab;
  if (thread == 0) n_chosen = n_candidates = 0;

  // log of the sum of exponentials, relative to the level's maximum, and that maximum.
  float largest = -INFINITY;
  if (warp_id() == 0) {
    const double* sums = scratch.sums + level * blocks;
    const float* maxima = scratch.maxima + level * blocks;
    for (int i = thread; i < blocks; i += 32) largest = fmaxf(largest, maxima[i]);
    largest = warp_reduce(largest, Max());
    double sum = 0;
    for (int i = thread; i < blocks; i += 32) {
      const double part = sums[i];  // 0 for a block of nothing but −inf
      if (part != 0) sum += part * exp(static_cast<double>(maxima[i]) - largest);
    }
    sum = warp_reduce(sum, Add());
    if (thread == 0) log_z = log(sum) + largest;  // −inf − inf, NaN: a level without a distribution
  }

  uint64_t bests[kGroupsOfThread];
#pragma unroll
  for (int i = 0; i < kGroupsOfThread; ++i) bests[i] = scratch.best[level * n_groups + i * kSelectThreads + thread];
  const uint64_t least = threshold(bests, top_k);
#pragma unroll
  for (int i = 0; i < kGroupsOfThread; ++i)
    if (bests[i] >= least) chosen_groups[atomicAdd(&n_chosen, 1)] = i * kSelectThreads + thread;
  __syncthreads();

  // Tokens of the chosen groups: any order will do, ranks come from the keys.
  const int tokens_of_group = ceil_div(vocab, n_groups), tokens = top_k * tokens_of_group;
  uint64_t keys[kMaxTokensOfThread];
  int reaching = 0;
#pragma unroll
  for (int i = 0; i < kMaxTokensOfThread; ++i) {
    const int n = i * kSelectThreads + thread;
    keys[i] = 0;
    if (n < tokens) {
      const int token = chosen_groups[n % top_k] + n / top_k * n_groups;
      if (token < vocab) keys[i] = key_of(logits[token], token);
      if (keys[i] < least) keys[i] = 0;
    }
    reaching += keys[i] != 0;
  }
  const int total = block_reduce(reaching, 0, Add());
  const uint64_t cut = total > kMaxCandidates ? threshold(keys, top_k) : least;
#pragma unroll
  for (int i = 0; i < kMaxTokensOfThread; ++i)
    if (keys[i] && keys[i] >= cut) candidates[atomicAdd(&n_candidates, 1)] = keys[i];
  __syncthreads();

  if (thread < n_candidates) {
    const uint64_t key = candidates[thread];
    int rank = 0;
    for (int i = 0; i < n_candidates; ++i) rank += candidates[i] > key;
    if (rank < top_k) {
      const double logit = value_of(static_cast<uint32_t>(key >> 32));
      scratch.tokens[level * top_k + rank] = index_of(key);
      scratch.log_probs[level * top_k + rank] = static_cast<float>(logit - log_z);
    }
  }
}

// ---- grow ------------------------------------------------------------------------------------------------------------
// A rank as bits: 1, then rank + 1 in the gamma code whose length prefix is written with ones: (length − 1) ones, a zero,
// the digits below the leading one. Left-aligned codes order as rank tuples do, a prefix first. A node of the tree has
// product(rank + 1) ≤ budget, as all tuples that are nowhere larger precede it; so a code has at most
// 2 · levels + 2 · log2(2 · budget) bits.
struct PathCode {
  uint64_t bits;  // left-aligned
  int length;
};
__device__ PathCode path_code(PathCode parent, int rank) {
  const int digits = 31 - __clz(rank + 1);  // below the leading one
  const uint64_t ones = (uint64_t{2} << digits) - 1;
  const uint64_t code = ones << (digits + 1) | (static_cast<uint64_t>(rank + 1) ^ uint64_t{1} << digits);
  const int length = 2 * digits + 2;
  return {parent.bits | code << (64 - parent.length - length), parent.length + length};
}

int code_bits(const TreeBuildShape& shape) {
  int log2 = 0;
  while (1 << log2 < 2 * shape.budget) ++log2;
  return 2 * shape.levels + 2 * log2;
}

// The next child of a row: the frontier has one for each row.
struct NextChild {
  uint32_t order;  // of its score; 0: there is none
  int rank, depth;
  float parent_score;
  PathCode parent_code;
  uint64_t code;
};

template <int kRowsOfLane>
__global__ void __launch_bounds__(32) grow(TreeBuildShape shape, TreeBuildArgs args, Scratch scratch) {
  extern __shared__ float log_probs[];  // [levels, top_k]
  const int lane = lane_id(), top_k = shape.top_k;
  if (args.state->done) {
    if (lane == 0) args.state->n_rows = 0;
    return;
  }
  for (int i = lane; i < shape.levels * top_k; i += 32) log_probs[i] = scratch.log_probs[i];
  __syncwarp();

  const auto score_of = [&](NextChild& next) {
    next.order = 0;
    if (next.depth > shape.levels || next.rank >= top_k) return;
    const float score = next.parent_score + log_probs[(next.depth - 1) * top_k + next.rank];
    if (!(score > -INFINITY)) return;
    next.order = ordered(score);
    next.code = path_code(next.parent_code, next.rank).bits;
  };
  NextChild mine[kRowsOfLane];
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) mine[i].order = 0;
  if (lane == 0) {
    mine[0] = {0, 0, 1, 0.0f, {0, 0}, 0};
    score_of(mine[0]);
    args.parents[0] = -1;
    args.depths[0] = 0;
  }

  int rows = 1;
  for (; rows <= shape.budget; ++rows) {
    NextChild best = mine[0];
    int parent = lane;
#pragma unroll
    for (int i = 1; i < kRowsOfLane; ++i)
      if (mine[i].order > best.order || (mine[i].order == best.order && mine[i].order && mine[i].code < best.code)) {
        best = mine[i];
        parent = 32 * i + lane;
      }
    const uint32_t order = __reduce_max_sync(kAllLanes, best.order);
    if (order == 0) break;
    unsigned winners = __ballot_sync(kAllLanes, best.order == order);
    if (winners & (winners - 1)) {  // equal scores: the smaller code
      const uint32_t high = static_cast<uint32_t>(best.code >> 32), low = static_cast<uint32_t>(best.code);
      bool still = best.order == order;
      still &= high == __reduce_min_sync(kAllLanes, still ? high : 0xFFFFFFFFu);
      still &= low == __reduce_min_sync(kAllLanes, still ? low : 0xFFFFFFFFu);
      winners = __ballot_sync(kAllLanes, still);
    }
    const int winner = __ffs(static_cast<int>(winners)) - 1;
    parent = __shfl_sync(kAllLanes, parent, winner);
    const int rank = __shfl_sync(kAllLanes, best.rank, winner), depth = __shfl_sync(kAllLanes, best.depth, winner);
    const uint64_t parent_bits = __shfl_sync(kAllLanes, best.parent_code.bits, winner);
    const int parent_length = __shfl_sync(kAllLanes, best.parent_code.length, winner);
    if (lane == 0) {
      args.parents[rows] = parent;
      args.depths[rows] = depth;
      args.tokens[rows] = scratch.tokens[(depth - 1) * top_k + rank];
    }
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      if (32 * i + lane == parent) {
        ++mine[i].rank;
        score_of(mine[i]);
      }
      if (32 * i + lane == rows) {
        mine[i] = {0, 0, depth + 1, value_of(order), path_code({parent_bits, parent_length}, rank), 0};
        score_of(mine[i]);
      }
    }
  }
  if (lane == 0) args.state->n_rows = rows;
}

// ---- the operator ----------------------------------------------------------------------------------------------------
size_t log_prob_bytes(const TreeBuildShape& shape) {
  return sizeof(float) * static_cast<size_t>(shape.levels) * static_cast<size_t>(shape.top_k);
}

const char* refuse(const TreeBuildShape& shape) {
  if (shape.levels < 0) return "levels: must not be negative";
  if (shape.budget < 0) return "budget: must not be negative";
  if (shape.budget > kMaxBudget) return "budget: more than 512";
  if (shape.top_k != std::min(shape.budget, shape.vocab)) return "top_k: must be min(budget, vocab)";
  if (code_bits(shape) > 64) return "levels: more than the rank tuples of this budget may have";
  if (log_prob_bytes(shape) > 48 * 1024) return "levels: more log-probs than fit a block's shared memory";
  if (int64_t{shape.top_k} * ceil_div(shape.vocab, groups_of(shape)) > kSelectThreads * kMaxTokensOfThread)
    return "vocab: too large for this budget";
  return nullptr;
}

size_t workspace(const TreeBuildShape& shape) { return Scratch::bytes(shape); }

template <int kRowsOfLane>
void launch_grow(const TreeBuildShape& shape, const TreeBuildArgs& args, const Scratch& scratch, cudaStream_t stream) {
  if (kRowsOfLane > 1 && shape.budget <= 16 * kRowsOfLane)
    launch_grow<kRowsOfLane / 2 + (kRowsOfLane == 1)>(shape, args, scratch, stream);
  else
    grow<kRowsOfLane><<<1, 32, log_prob_bytes(shape), stream>>>(shape, args, scratch);
}

void run(const TreeBuildShape& shape, const TreeBuildArgs& args, void* workspace, cudaStream_t stream) {
  const Scratch scratch(shape, args, workspace);
  if (log_prob_bytes(shape)) {
    const int n_groups = groups_of(shape);
    const dim3 grid(static_cast<unsigned>(n_groups / kGroupsOfBlock), static_cast<unsigned>(shape.levels));
    const auto levels = static_cast<unsigned>(shape.levels);
    const int32_t* done = &args.state->done;
    groups<<<grid, kGroupThreads, 0, stream>>>(args.logits, done, shape.vocab, n_groups, scratch);
    if (n_groups == 2048)
      select<2><<<levels, kSelectThreads, 0, stream>>>(args.logits, done, shape.vocab, shape.top_k, scratch);
    else
      select<8><<<levels, kSelectThreads, 0, stream>>>(args.logits, done, shape.vocab, shape.top_k, scratch);
  }
  launch_grow<16>(shape, args, scratch, stream);
}

}  // namespace

const Operator tree_build = {"tree_build", refuse_as<TreeBuildShape, refuse>,
                             no_bytes,     nullptr,
                             bytes_as<TreeBuildShape, workspace>,
                             run_as<TreeBuildShape, TreeBuildArgs, run>};

}  // namespace kdtree
