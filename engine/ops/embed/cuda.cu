#include "../cuda/operator.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

template <class Element>
__global__ void copy_rows(const int32_t* n_rows, const int32_t* tokens, const Element* table, int hidden, Element* y) {
  for (int64_t row = blockIdx.x; row < *n_rows; row += gridDim.x)
    for (int64_t c = threadIdx.x; c < hidden; c += blockDim.x)
      y[row * hidden + c] = table[int64_t{tokens[row]} * hidden + c];
}

template <class Element>
void launch(const EmbedShape& shape, const EmbedArgs& args, cudaStream_t stream) {
  copy_rows<<<grid_for(shape.max_rows, 1, 8), 256, 0, stream>>>(
      args.n_rows, args.tokens, static_cast<const Element*>(args.table), shape.hidden, static_cast<Element*>(args.y));
}

void run(const EmbedShape& shape, const EmbedArgs& args, void*, cudaStream_t stream) {
  shape.type == kBFloat16 ? launch<uint16_t>(shape, args, stream) : launch<uint32_t>(shape, args, stream);
}

}  // namespace

const Operator embed = {"embed", accept_any, no_bytes, nullptr, no_bytes, run_as<EmbedShape, EmbedArgs, run>};

}  // namespace kdtree
