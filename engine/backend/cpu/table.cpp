// The operators of every path; operators() gives the chosen path's.
#include "../backend.h"
#include "path.h"

#define KDTREE_OPERATORS(X)                                                                                      \
  X(draft_script) X(tree_build) X(embed) X(rms_norm) X(gemm) X(rope) X(tree_attention) X(moe_route) X(moe_experts) \
  X(swiglu) X(w4a16_gemm) X(w4a16_moe_experts) X(argmax) X(tree_accept) X(kv_compact)
#define KDTREE_DECLARE(name) extern const Operator name;
#define KDTREE_ENTRY(name) &name,
#define KDTREE_TABLE(path)                                                              \
  namespace path {                                                                      \
  KDTREE_OPERATORS(KDTREE_DECLARE)                                                      \
  static const Operator* const table[] = {KDTREE_OPERATORS(KDTREE_ENTRY) nullptr};      \
  }

namespace kdtree {

KDTREE_TABLE(portable)
#ifdef __x86_64__
KDTREE_TABLE(avx2)
KDTREE_TABLE(avx512)
#endif

const Operator* const* backend::operators() {
#ifdef __x86_64__
  if (cpu::path() == cpu::Path::avx512) return avx512::table;
  if (cpu::path() == cpu::Path::avx2) return avx2::table;
#endif
  return portable::table;
}

}  // namespace kdtree
