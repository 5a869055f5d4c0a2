#include "path.h"

#include <cstdlib>
#include <string>

namespace kdtree::cpu {
namespace {

Path chosen = Path::portable;

const char* const kNames[] = {"portable", "avx2", "avx512"};

bool supported(Path path) {
#ifdef __x86_64__
  switch (path) {
    case Path::portable:
      return true;
    case Path::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Path::avx512:
      return supported(Path::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return path == Path::portable;
}

}  // namespace

const char* choose_path() {
  static std::string reason;
  const char* wanted = std::getenv("KDTREE_CPU");
  for (Path path : {Path::avx512, Path::avx2, Path::portable}) {
    const char* name = kNames[static_cast<int>(path)];
    if (wanted && *wanted && std::string(wanted) != name) continue;
    if (supported(path)) {
      chosen = path;
      return nullptr;
    }
    if (wanted && *wanted) {
      reason = std::string("KDTREE_CPU: ") + wanted + ": this CPU does not have its instructions";
      return reason.c_str();
    }
  }
  reason = std::string("KDTREE_CPU: ") + wanted + ": must be portable, avx2 or avx512";
  return reason.c_str();
}

Path path() { return chosen; }
const char* path_name() { return kNames[static_cast<int>(chosen)]; }

}  // namespace kdtree::cpu
