// What must happen to kernels before the first graph is captured.
#pragma once

namespace kdtree::cuda {

struct KernelInit {
  const char* name;
  int (*init)();  // sets kernel attributes, asks what the device holds; 0 or the CUDA error; null ends the list
};

const KernelInit* kernel_inits();

}  // namespace kdtree::cuda
