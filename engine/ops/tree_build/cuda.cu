// Three launches, nothing on the host.
//
//   groups   Token t of a level belongs to group t mod groups. Every group's best key, and every block's maximum and sum
//            of exponentials in double. One pass over the logits: the floor is 4 · levels · vocab bytes.
//   select   A block a level. The top_k-th of a sample of the groups' bests bounds the top-k from below; the tokens that
//            reach it are the candidates, all in the few groups whose best does. Ranking them by counting gives the top-k,
//            the blocks' sums its log-probs.
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
constexpr int kMaxCandidates = kSelectThreads;
constexpr int kMaxTokensOfThread = 16;  // of the chosen groups

// visit(i, number of larger keys) for each of n ≤ 1024 different keys in shared memory. Every warp calls it.
template <class Visit>
__device__ void rank_keys(const uint64_t* keys, int n, Visit visit) {
  int threads = 32;  // that share a key
  while (threads > 1 && threads * n > kSelectThreads) threads /= 2;
  const int i = static_cast<int>(threadIdx.x) / threads, part = static_cast<int>(threadIdx.x) % threads;
  const uint64_t key = i < n ? keys[i] : 0;
  int larger = 0;
  if (i < n)
    for (int other = part; other < n; other += threads) larger += keys[other] > key;
  for (int mask = threads / 2; mask; mask /= 2) larger += __shfl_xor_sync(kAllLanes, larger, mask);
  if (i < n && part == 0) visit(i, larger);
}

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

// Of a sample of 2 · top_k or more keys (each the best of some groups), the top_k-th: at least top_k tokens reach it,
// 1.4 · top_k of a random level.
__host__ __device__ constexpr int sample_size(int top_k) {
  int size = 128;
  while (size < 2 * top_k) size *= 2;
  return size;
}
static_assert(sample_size(kMaxBudget) <= kSelectThreads, "a thread a key");

template <int kGroupsOfThread>
__global__ void __launch_bounds__(kSelectThreads)
    select(const float* all_logits, const int32_t* done, int vocab, int top_k, Scratch scratch) {
  if (*done) return;
  constexpr int n_groups = kGroupsOfThread * kSelectThreads, blocks = n_groups / kGroupsOfBlock;
  __shared__ uint64_t keys[kSelectThreads], sample[kSelectThreads];
  __shared__ uint16_t chosen_groups[n_groups];
  __shared__ int n_chosen, n_candidates;
  __shared__ uint64_t shared_least;
  __shared__ double log_z;
  const int64_t level = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const float* logits = all_logits + level * vocab;

  uint64_t bests[kGroupsOfThread], best = 0;
#pragma unroll
  for (int i = 0; i < kGroupsOfThread; ++i) {
    bests[i] = scratch.best[level * n_groups + i * kSelectThreads + thread];
    best = max(best, bests[i]);
  }
  keys[thread] = best;
  if (thread == 0) {
    n_chosen = n_candidates = 0;
    shared_least = 0;
  }

  // log of the sum of exponentials.
  if (warp_id() == kSelectThreads / 32 - 1) {
    const double* sums = scratch.sums + level * blocks;
    const float* maxima = scratch.maxima + level * blocks;
    float largest = -INFINITY;
    for (int i = lane_id(); i < blocks; i += 32) largest = fmaxf(largest, maxima[i]);
    largest = warp_reduce(largest, Max());
    double sum = 0;
    for (int i = lane_id(); i < blocks; i += 32) {
      const double part = sums[i];  // 0 for a block of nothing but −inf
      if (part != 0) sum += part * exp(static_cast<double>(maxima[i]) - largest);
    }
    sum = warp_reduce(sum, Add());
    if (lane_id() == 0) log_z = log(sum) + largest;  // −inf − inf, NaN: a level without a distribution
  }
  __syncthreads();

  const int n_sample = sample_size(top_k);
  if (thread < n_sample) {
    for (int i = thread + n_sample; i < kSelectThreads; i += n_sample) best = max(best, keys[i]);
    sample[thread] = best;
  }
  __syncthreads();
  rank_keys(sample, n_sample, [&](int i, int rank) {
    if (rank == top_k - 1) shared_least = sample[i];
  });
  __syncthreads();
  uint64_t least = max(shared_least, uint64_t{1});  // where the sample has fewer keys than top_k: any key

  // The tokens of the groups whose best reaches it. Any order will do: ranks come from the keys.
#pragma unroll
  for (int i = 0; i < kGroupsOfThread; ++i)
    if (bests[i] >= least) chosen_groups[atomicAdd(&n_chosen, 1)] = static_cast<uint16_t>(i * kSelectThreads + thread);
  __syncthreads();
  if (n_chosen * ceil_div(vocab, n_groups) > kSelectThreads * kMaxTokensOfThread) {  // take only as many as needed
    least = threshold(bests, top_k);
    if (thread == 0) n_chosen = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kGroupsOfThread; ++i)
      if (bests[i] >= least) chosen_groups[atomicAdd(&n_chosen, 1)] = static_cast<uint16_t>(i * kSelectThreads + thread);
    __syncthreads();
  }
  const int tokens = n_chosen * ceil_div(vocab, n_groups);
  uint64_t candidates[kMaxTokensOfThread];
  int reaching = 0;
#pragma unroll
  for (int i = 0; i < kMaxTokensOfThread; ++i) {
    const int n = i * kSelectThreads + thread;
    candidates[i] = 0;
    if (n < tokens) {
      const int token = chosen_groups[n % n_chosen] + n / n_chosen * n_groups;
      if (token < vocab) candidates[i] = key_of(logits[token], token);
      if (candidates[i] < least) candidates[i] = 0;
    }
    reaching += candidates[i] != 0;
  }
  if (block_reduce(reaching, 0, Add()) > kMaxCandidates) least = threshold(candidates, top_k);
#pragma unroll
  for (int i = 0; i < kMaxTokensOfThread; ++i)
    if (candidates[i] && candidates[i] >= least) keys[atomicAdd(&n_candidates, 1)] = candidates[i];
  __syncthreads();
  rank_keys(keys, n_candidates, [&](int i, int rank) {
    if (rank >= top_k) return;
    const double logit = value_of(static_cast<uint32_t>(keys[i] >> 32));
    scratch.tokens[level * top_k + rank] = index_of(keys[i]);
    scratch.log_probs[level * top_k + rank] = static_cast<float>(logit - log_z);
  });
}

// ---- grow ------------------------------------------------------------------------------------------------------------
// A rank as bits: rank + 1 in a gamma code, one more one than the digits below its leading one, a zero, these digits.
// Left-aligned, such codes order as rank tuples do, a prefix before its extensions. A node of the tree has
// product(rank + 1) ≤ budget, as all tuples that are nowhere larger precede it; so the code of a node or its sibling
// has at most 2 · levels + 2 · log2(2 · budget) bits.
__device__ int rank_digits(int rank) { return 31 - __clz(rank + 1); }
__device__ int code_length(int rank) { return 2 * rank_digits(rank) + 2; }
__device__ uint64_t append_rank(uint64_t bits, int length, int rank) {
  const int digits = rank_digits(rank);
  const uint64_t ones = (uint64_t{2} << digits) - 1;
  const uint64_t code = ones << (digits + 1) | (static_cast<uint64_t>(rank + 1) ^ uint64_t{1} << digits);
  return bits | code << ((64 - length - code_length(rank)) & 63);  // within 64 for all codes that are used
}

int code_bits(const TreeBuildShape& shape) {
  int log2 = 0;
  while (1 << log2 < 2 * shape.budget) ++log2;
  return 2 * shape.levels + 2 * log2;
}

// The next child of a row: the frontier holds one for each row.
struct NextChild {
  uint32_t order;  // of its score; 0: there is none
  float parent_score;
  uint64_t code, parent_code;
  uint32_t packed;  // row, rank, depth, length of parent_code in 10, 10, 5, 7 bits
};
__device__ uint32_t pack(int row, int rank, int depth, int length) {
  return static_cast<uint32_t>(row << 22 | rank << 12 | depth << 7 | length);
}
__device__ int row_of(uint32_t packed) { return static_cast<int>(packed >> 22); }
__device__ int rank_of(uint32_t packed) { return static_cast<int>(packed >> 12 & 1023); }
__device__ int depth_of(uint32_t packed) { return static_cast<int>(packed >> 7 & 31); }
__device__ int length_of(uint32_t packed) { return static_cast<int>(packed & 127); }

// −inf and NaN are never pushed.
__device__ uint32_t order_of(float score) { return score > -INFINITY ? ordered(score) : 0; }

template <int kRowsOfLane>
__global__ void __launch_bounds__(32) grow(TreeBuildShape shape, TreeBuildArgs args, Scratch scratch) {
  extern __shared__ float log_probs[];  // [levels, top_k]
  __shared__ uint32_t nodes[kMaxBudget + 1];
  const int lane = lane_id(), top_k = shape.top_k;
  if (args.state->done) {
    if (lane == 0) args.state->n_rows = 0;
    return;
  }
  for (int i = lane; i < shape.levels * top_k; i += 32) log_probs[i] = scratch.log_probs[i];
  __syncwarp();

  NextChild mine[kRowsOfLane];
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) mine[i] = {0, 0, 0, 0, pack(0, 0, 1, 0)};
  if (lane == 0 && shape.levels * top_k > 0)
    mine[0] = {order_of(log_probs[0]), 0, append_rank(0, 0, 0), 0, pack(0, 0, 1, 0)};

  int rows = 1;
  for (; rows <= shape.budget; ++rows) {
    NextChild best = mine[0];
    int slot = 0;
#pragma unroll
    for (int i = 1; i < kRowsOfLane; ++i)
      if (mine[i].order > best.order || (mine[i].order == best.order && mine[i].code < best.code)) {
        best = mine[i];
        slot = i;
      }
    const uint32_t order = __reduce_max_sync(kAllLanes, best.order);
    if (order == 0) break;
    unsigned winners = __ballot_sync(kAllLanes, best.order == order);

    // What follows each lane's best, should it win: its next sibling takes its place, its first child joins.
    const int rank = rank_of(best.packed), depth = depth_of(best.packed), length = length_of(best.packed);
    const int child_length = length + code_length(rank);
    const float score = value_of(best.order);
    const float sibling_log_prob = rank + 1 < top_k ? log_probs[(depth - 1) * top_k + rank + 1] : -INFINITY;
    const float child_log_prob = depth < shape.levels ? log_probs[depth * top_k] : -INFINITY;
    const uint32_t sibling_order = order_of(best.parent_score + sibling_log_prob);
    const uint64_t sibling_code = append_rank(best.parent_code, length, rank + 1);
    uint32_t child_order = order_of(score + child_log_prob);
    uint64_t child_code = best.code | uint64_t{2} << ((62 - child_length) & 63);  // of rank 0
    const uint32_t child = pack(rows, 0, depth + 1, child_length);

    if (winners & (winners - 1)) {  // equal scores: the smaller code
      const uint32_t high = static_cast<uint32_t>(best.code >> 32), low = static_cast<uint32_t>(best.code);
      bool still = best.order == order;
      still &= high == __reduce_min_sync(kAllLanes, still ? high : 0xFFFFFFFFu);
      still &= low == __reduce_min_sync(kAllLanes, still ? low : 0xFFFFFFFFu);
      winners = __ballot_sync(kAllLanes, still);
    }
    const int winner = __ffs(static_cast<int>(winners)) - 1;
    const NextChild joins = {__shfl_sync(kAllLanes, child_order, winner), value_of(order),
                             __shfl_sync(kAllLanes, child_code, winner), __shfl_sync(kAllLanes, best.code, winner),
                             __shfl_sync(kAllLanes, child, winner)};
    if (lane == winner) nodes[rows] = best.packed;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      if (lane == winner && i == slot) {
        mine[i].order = sibling_order;
        mine[i].code = sibling_code;
        mine[i].packed = best.packed + (1 << 12);
      }
      if (32 * i + lane == rows) mine[i] = joins;
    }
  }
  __syncwarp();
  for (int row = 1 + lane; row < rows; row += 32) {
    const uint32_t node = nodes[row];
    args.parents[row] = row_of(node);
    args.depths[row] = depth_of(node);
    args.tokens[row] = scratch.tokens[(depth_of(node) - 1) * top_k + rank_of(node)];
  }
  if (lane == 0) {
    args.parents[0] = -1;
    args.depths[0] = 0;
    args.state->n_rows = rows;
  }
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
  if (log_prob_bytes(shape) + 4 * (kMaxBudget + 1) > 48 * 1024) return "levels: more log-probs than fit a block's shared memory";
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
