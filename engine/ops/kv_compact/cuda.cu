// One launch for all layers. A thread owns a column of one layer and moves it down in ascending order, up to 8 rows at
// a time: all 8 are read before any is written. Floor: 2 · accepted · width · layers elements.
#include "../cuda/operator.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 128;
constexpr int kAtOnce = 8;

// `width` and offsets in Words, the widest unit that rows are multiples of.
template <class Word>
__global__ void move_rows(const DecodeState* state, const int32_t* accepted_rows, Word* kv, int width, int64_t pool_rows) {
  const int accepted = state->accepted;
  const int column = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (column >= width) return;
  const int64_t base = int64_t{state->prefix} - accepted;
  Word* pool = kv + (blockIdx.y * pool_rows + base) * width + column;
  for (int first = 0; first < accepted; first += kAtOnce) {
    int64_t from[kAtOnce];
    Word word[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) from[i] = first + i < accepted ? accepted_rows[first + i] : first + i;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (from[i] != first + i) word[i] = pool[from[i] * width];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (from[i] != first + i) pool[int64_t{first + i} * width] = word[i];
  }
}

template <class Word>
void launch(const KvCompactShape& shape, const KvCompactArgs& args, size_t row_bytes, cudaStream_t stream) {
  const int width = static_cast<int>(row_bytes / sizeof(Word));
  const dim3 grid(static_cast<unsigned>(ceil_div(width, kThreads)), static_cast<unsigned>(shape.layers));
  move_rows<<<grid, kThreads, 0, stream>>>(args.state, args.accepted_rows, static_cast<Word*>(args.kv), width,
                                           int64_t{shape.pool_rows});
}

void run(const KvCompactShape& shape, const KvCompactArgs& args, void*, cudaStream_t stream) {
  const size_t row_bytes = static_cast<size_t>(shape.width) * size_of(shape.type);
  const auto unit = reinterpret_cast<uintptr_t>(args.kv) | row_bytes;
  if (unit % 16 == 0)
    launch<uint4>(shape, args, row_bytes, stream);
  else if (unit % 4 == 0)
    launch<uint32_t>(shape, args, row_bytes, stream);
  else
    launch<uint16_t>(shape, args, row_bytes, stream);
}

}  // namespace

const Operator kv_compact = {"kv_compact", accept_any, no_bytes, nullptr,
                             no_bytes,     run_as<KvCompactShape, KvCompactArgs, run>};

}  // namespace kdtree
