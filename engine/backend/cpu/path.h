// Which instruction set the operators use: decided once, by what the CPU has or by the environment's KDTREE_CPU.
#pragma once

namespace kdtree::cpu {

enum class Path { portable, avx2, avx512 };

// Null, or why KDTREE_CPU cannot be followed.
const char* choose_path();
Path path();
const char* path_name();

}  // namespace kdtree::cpu
