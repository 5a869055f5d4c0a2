#include "../cpu/operator_cpu.h"
#include "op.h"

#include <cstring>

namespace kdtree::KDTREE_PATH {
namespace {

void run(const EmbedShape& shape, const EmbedArgs& args, void*) {
  const size_t row = static_cast<size_t>(shape.hidden) * size_of(shape.type);
  for (int32_t i = 0; i < *args.n_rows; ++i)
    std::memcpy(static_cast<char*>(args.y) + i * row, static_cast<const char*>(args.table) + args.tokens[i] * row, row);
}

}  // namespace

KDTREE_OPERATOR(embed) = {"embed", accept_any, no_bytes, nullptr, no_bytes, run_as<EmbedShape, EmbedArgs, run>};

}  // namespace kdtree::KDTREE_PATH
