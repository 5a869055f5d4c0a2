#include "../cpu/operator_cpu.h"
#include "op.h"

#include <cstring>

namespace kdtree::KDTREE_PATH {
namespace {

void run(const KvCompactShape& shape, const KvCompactArgs& args, void*) {
  const int64_t base = int64_t{args.state->prefix} - args.state->accepted;
  const size_t row = static_cast<size_t>(shape.width) * size_of(shape.type);
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    char* pool = static_cast<char*>(args.kv) + static_cast<size_t>(layer * shape.pool_rows + base) * row;
    for (int64_t i = 0; i < args.state->accepted; ++i)
      if (args.accepted_rows[i] != i)
        std::memcpy(pool + static_cast<size_t>(i) * row, pool + static_cast<size_t>(args.accepted_rows[i]) * row, row);
  }
}

}  // namespace

KDTREE_OPERATOR(kv_compact) = {"kv_compact", accept_any, no_bytes, nullptr,
                               no_bytes,     run_as<KvCompactShape, KvCompactArgs, run>};

}  // namespace kdtree::KDTREE_PATH
