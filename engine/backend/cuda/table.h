// What must happen to kernels before the first graph is captured.
#pragma once
#include <cuda_runtime.h>

namespace kdtree::cuda {

struct KernelInit {
  const char* name;
  cudaError_t (*init)();  // sets kernel attributes; null ends the list
};

const KernelInit* kernel_inits();

}  // namespace kdtree::cuda
