// One block. Every row looks up its parent's choice at once; one thread then follows the matches, a shared-memory read
// a step; the committed tokens are tested for stop tokens and written in parallel.
#include "../cuda/operator.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 128;

__global__ void accept(TreeAcceptArgs args) {
  extern __shared__ int32_t shared[];
  __shared__ int32_t accepted, first_stop;
  const DecodeState before = *args.state;
  const int n_rows = before.n_rows, thread = static_cast<int>(threadIdx.x);
  if (n_rows == 0) {
    if (thread == 0) args.state->accepted = args.state->verified = 0;
    return;
  }
  int32_t* matched_child = shared;    // [n_rows]
  int32_t* path = shared + n_rows;    // [n_rows], then the committed tokens
  for (int row = thread; row < n_rows; row += kThreads) matched_child[row] = n_rows;
  __syncthreads();
  for (int row = thread + 1; row < n_rows; row += kThreads) {
    const int parent = args.parents[row];
    if (args.tokens[row] == args.next_tokens[parent]) atomicMin(&matched_child[parent], row);
  }
  __syncthreads();
  if (thread == 0) {
    int count = 0;
    for (int row = 0; row < n_rows; row = matched_child[row]) path[count++] = row;
    accepted = count;
    first_stop = count;
  }
  __syncthreads();

  const int count = accepted;
  bool nan = false;
  for (int i = thread; i < count; i += kThreads) {
    const int row = path[i], token = args.next_tokens[row];
    args.accepted_rows[i] = row;
    path[i] = token;
    nan |= token < 0;
    for (int s = 0; s < before.n_stop_ids; ++s)
      if (args.stop_ids[s] == token) atomicMin(&first_stop, i);
  }
  if (__syncthreads_or(nan)) {
    if (thread == 0) {
      args.state->accepted = 0;
      args.state->verified = n_rows;
      args.state->done = kNanLogits;
      args.state->n_rows = 0;
    }
    return;
  }
  const int emitted = min(min(count, first_stop + 1), max(before.limit - before.generated, 1));
  for (int i = thread; i < emitted; i += kThreads) args.output[before.generated + i] = path[i];
  if (thread == 0) {
    DecodeState after = before;
    after.done = first_stop < emitted                            ? kStopToken
                 : before.generated + emitted >= before.limit ? kTokenLimit
                                                                 : kRunning;
    after.n_rows = after.done == kRunning ? 1 : 0;
    after.prefix += count;
    after.generated += emitted;
    after.committed += count;
    after.steps += 1;
    after.accepted = count;
    after.verified = n_rows;
    *args.state = after;
    args.tokens[0] = path[count - 1];
  }
}

size_t shared_bytes(const TreeAcceptShape& shape) { return 2 * sizeof(int32_t) * static_cast<size_t>(shape.max_rows); }

const char* refuse(const TreeAcceptShape& shape) {
  return shared_bytes(shape) > 48 * 1024 - 64 ? "max_rows: more rows than fit a block's shared memory" : nullptr;
}

void run(const TreeAcceptShape& shape, const TreeAcceptArgs& args, void*, cudaStream_t stream) {
  accept<<<1, kThreads, shared_bytes(shape), stream>>>(args);
}

}  // namespace

const Operator tree_accept = {"tree_accept", refuse_as<TreeAcceptShape, refuse>,
                              no_bytes,      nullptr,
                              no_bytes,      run_as<TreeAcceptShape, TreeAcceptArgs, run>};

}  // namespace kdtree
