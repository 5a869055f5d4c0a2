// Three launches, nothing on the host.
//
//   groups   Token t of a level belongs to group t mod groups. Every group's best key, and every block's maximum and sum
//            of exponentials in double. One pass over the logits: the floor is 4 · levels · vocab bytes.
//   select   A block a level. The top_k-th of a sample of the groups' bests bounds the top-k from below; the tokens that
//            reach it are the candidates, all in the few groups whose best does. Ranking them by counting gives the top-k,
//            the blocks' sums its log-probs.
//   grow     One warp. A row's children are popped in rank order, so the frontier is one score a row: its next child's.
//            Lane r mod 32 keeps row r's in a register; a pop is a warp-wide maximum, and its place is the parent row.
//
// A key (numbers.cuh) is a logit and its token in one integer, so there are no ties: a level of equal logits is as
// cheap as any. A rank tuple is a bit string that orders as the tuple does: `Code`.
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
constexpr int kLoads = 32;  // of a thread, in flight together

// 16 groups or more for one wanted token: then few groups hold two of the best.
int groups_of(const TreeBuildShape& shape) { return shape.top_k <= 128 ? 2048 : 8192; }

struct Scratch {
  uint64_t* best;    // [levels, groups]
  double* sums;      // [levels, groups / kGroupsOfBlock]: of exp(logit − maximum)
  float* maxima;     // [levels, groups / kGroupsOfBlock]
  float* log_probs;  // [levels, top_k]
  int32_t* tokens;   // [levels, top_k]

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

// sum · exp(from − to), where an empty sum stays empty although its maximum is −inf.
__device__ double rescale(double sum, float from, float to) {
  return sum == 0 ? 0.0 : sum * exp(static_cast<double>(from) - to);
}

__global__ void __launch_bounds__(kGroupThreads)
    groups(const float* all_logits, const int32_t* done, int vocab, int n_groups, Scratch scratch) {
  if (*done) return;
  const int level = static_cast<int>(blockIdx.y), block = static_cast<int>(blockIdx.x);
  const float* logits = all_logits + int64_t{level} * vocab;
  const int group = block * kGroupsOfBlock + static_cast<int>(threadIdx.x) % kGroupsOfBlock;
  const int part = static_cast<int>(threadIdx.x) / kGroupsOfBlock, step = kTokensAtOnce * n_groups;

  uint64_t best = 0;
  float largest = -INFINITY;
  double sum = 0;
  for (int first = group + part * n_groups; first < vocab; first += kLoads * step) {
    float loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loaded[i] = first + i * step < vocab ? logits[first + i * step] : -INFINITY;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (first + i * step < vocab) best = max(best, key_of(loaded[i], first + i * step));
    const float before = largest;
    largest = value_of(static_cast<uint32_t>(best >> 32));  // NaN if there is nothing else: so are the sums
    sum = rescale(sum, before, largest);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (loaded[i] != -INFINITY) sum += exp(static_cast<double>(loaded[i]) - largest);
  }

  __shared__ uint64_t best_of_part[kGroupThreads];
  best_of_part[threadIdx.x] = best;
  const float block_largest = block_reduce(largest, -INFINITY, Max());
  if (part == 0) {
    for (int p = 1; p < kTokensAtOnce; ++p) best = max(best, best_of_part[threadIdx.x + p * kGroupsOfBlock]);
    scratch.best[int64_t{level} * n_groups + group] = best;
  }
  sum = block_reduce(rescale(sum, largest, block_largest), 0.0, Add());
  if (threadIdx.x == 0) {
    scratch.sums[level * gridDim.x + block] = sum;
    scratch.maxima[level * gridDim.x + block] = block_largest;
  }
}

// ---- select ----------------------------------------------------------------------------------------------------------
constexpr int kSelectThreads = 1024;
constexpr int kMaxCandidates = kSelectThreads;

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

// Of a sample of 2 · top_k or more keys (each the best of some groups), the top_k-th: at least top_k tokens reach it,
// 1.4 · top_k of a random level.
__host__ __device__ constexpr int sample_size(int top_k) {
  int size = 128;
  while (size < 2 * top_k) size *= 2;
  return size;
}
static_assert(sample_size(kMaxBudget) <= kSelectThreads, "a thread a key");

template <int kGroupsOfThread>
__global__ void __launch_bounds__(kSelectThreads, 1)
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
    for (int i = lane_id(); i < blocks; i += 32) sum += rescale(sums[i], maxima[i], largest);
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

  // The tokens that reach it, all in the groups whose best does. Any order will do: ranks come from the keys.
#pragma unroll
  for (int i = 0; i < kGroupsOfThread; ++i)
    if (bests[i] >= least) chosen_groups[atomicAdd(&n_chosen, 1)] = static_cast<uint16_t>(i * kSelectThreads + thread);
  __syncthreads();
  // Calls visit(key) for the tokens of the chosen groups, a warp a group.
  const auto visit_tokens = [&](auto&& visit) {
    for (int i = warp_id(); i < n_chosen; i += kSelectThreads / 32)
#pragma unroll 4
      for (int token = chosen_groups[i] + lane_id() * n_groups; token < vocab; token += 32 * n_groups)
        visit(key_of(logits[token], token));
  };
  visit_tokens([&](uint64_t key) {
    if (key < least) return;
    const int i = atomicAdd(&n_candidates, 1);
    if (i < kMaxCandidates) keys[i] = key;
  });
  __syncthreads();
  if (n_candidates > kMaxCandidates) {  // the best tokens share few groups: find the top_k-th key bit by bit
    least = 0;
    for (int bit = 63, count = 0; bit >= 0 && count != top_k; --bit) {
      const uint64_t higher = least | uint64_t{1} << bit;
      int mine = 0;
      visit_tokens([&](uint64_t key) { mine += key >= higher; });
      count = block_reduce(mine, 0, Add());
      if (count >= top_k) least = higher;
    }
    if (thread == 0) n_candidates = 0;
    __syncthreads();
    visit_tokens([&](uint64_t key) {
      if (key >= least) keys[atomicAdd(&n_candidates, 1)] = key;
    });
    __syncthreads();
  }
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
struct Code {
  uint64_t bits;
  int length;
};
__device__ Code append(Code code, int rank) {
  const int digits = 31 - __clz(rank + 1), length = 2 * digits + 2;
  const uint32_t ones = (2u << digits) - 1, rest = static_cast<uint32_t>(rank + 1) ^ 1u << digits;
  code.length += length;
  code.bits |= uint64_t{ones << (digits + 1) | rest} << (64 - code.length);
  return code;
}

int code_bits(const TreeBuildShape& shape) {
  int log2 = 0;
  while (1 << log2 < 2 * shape.budget) ++log2;
  return 2 * shape.levels + 2 * log2;
}

struct alignas(16) Row {
  float score;
  uint32_t packed;  // rank of its next child, its depth, length of its code
  uint64_t code;
  __device__ int next_rank() const { return static_cast<int>(packed >> 16); }
  __device__ int depth() const { return static_cast<int>(packed >> 8 & 255); }
  __device__ int length() const { return static_cast<int>(packed & 255); }
};
__device__ uint32_t pack(int next_rank, int depth, int length) {
  return static_cast<uint32_t>(next_rank << 16 | depth << 8 | length);
}

// −inf and NaN are never pushed.
__device__ uint32_t order_of(float score) { return score > -INFINITY ? ordered(score) : 0; }

template <int kRowsOfLane>
__global__ void __launch_bounds__(32) grow(TreeBuildShape shape, TreeBuildArgs args, Scratch scratch) {
  extern __shared__ float log_probs[];  // [levels, top_k]
  __shared__ Row row[kMaxBudget + 1];
  const int lane = lane_id(), top_k = shape.top_k;
  if (args.state->done) {
    if (lane == 0) args.state->n_rows = 0;
    return;
  }
  for (int i = lane; i < shape.levels * top_k; i += 32) log_probs[i] = scratch.log_probs[i];
  if (lane == 0) {
    row[0] = {0, pack(0, 0, 0), 0};
    args.parents[0] = -1;
    args.depths[0] = 0;
  }
  __syncwarp();

  uint32_t waiting[kRowsOfLane];  // of rows lane, lane + 32, …: the order of the next child's score; 0: it has none
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) waiting[i] = 0;
  if (lane == 0 && shape.levels * top_k > 0) waiting[0] = order_of(log_probs[0]);

  int rows = 1;
  for (; rows <= shape.budget; ++rows) {
    uint32_t order = waiting[0];
#pragma unroll
    for (int i = 1; i < kRowsOfLane; ++i) order = max(order, waiting[i]);
    order = __reduce_max_sync(kAllLanes, order);
    if (order == 0) break;
    int parent = 0, equal = 0;
#pragma unroll
    for (int i = kRowsOfLane - 1; i >= 0; --i) {
      const unsigned lanes = __ballot_sync(kAllLanes, waiting[i] == order);
      if (lanes) parent = 32 * i + __ffs(static_cast<int>(lanes)) - 1;
      equal += __popc(lanes);
    }
    if (equal > 1) {  // the smaller rank tuple
      uint64_t code = ~uint64_t{0};
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i)
        if (waiting[i] == order) {
          const Row& candidate = row[32 * i + lane];
          const Code its = append({candidate.code, candidate.length()}, candidate.next_rank());
          if (its.bits < code) {
            code = its.bits;
            parent = 32 * i + lane;
          }
        }
      const uint32_t high = static_cast<uint32_t>(code >> 32), least = __reduce_min_sync(kAllLanes, high);
      const uint32_t low = high == least ? static_cast<uint32_t>(code) : 0xFFFFFFFFu;
      const uint32_t least_low = __reduce_min_sync(kAllLanes, low);
      const unsigned first = __ballot_sync(kAllLanes, high == least && low == least_low);
      parent = __shfl_sync(kAllLanes, parent, __ffs(static_cast<int>(first)) - 1);
    }

    const Row from = row[parent];
    const int rank = from.next_rank(), depth = from.depth() + 1;
    const float score = value_of(order);
    const uint32_t sibling =
        rank + 1 < top_k ? order_of(from.score + log_probs[(depth - 1) * top_k + rank + 1]) : 0;
    const uint32_t child = depth < shape.levels ? order_of(score + log_probs[depth * top_k]) : 0;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      if (32 * i + lane == parent) waiting[i] = sibling;
      if (32 * i + lane == rows) waiting[i] = child;
    }
    __syncwarp();  // all have read row[parent]
    if (lane == 0) {
      const Code code = append({from.code, from.length()}, rank);
      row[parent].packed = pack(rank + 1, depth - 1, from.length());
      row[rows] = {score, pack(0, depth, code.length), code.bits};
      args.parents[rows] = parent;
      args.depths[rows] = depth;
      args.tokens[rows] = rank;  // made a token below
    }
    __syncwarp();
  }

  for (int r = 1 + lane; r < rows; r += 32)
    args.tokens[r] = scratch.tokens[(args.depths[r] - 1) * top_k + args.tokens[r]];
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
  if (log_prob_bytes(shape) + sizeof(Row) * (kMaxBudget + 1) > 48 * 1024) return "levels: more log-probs than fit a block's shared memory";
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
