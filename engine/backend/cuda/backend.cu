#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../ops/cuda/operator.cuh"
#include "../backend.h"
#include "table.h"

namespace kdtree::cuda {

int multiprocessors = 0;
Rung rung = Rung::kStream;

}  // namespace kdtree::cuda

namespace kdtree::backend {
namespace {

cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t cuda_event(Event event) { return static_cast<cudaEvent_t>(event); }

// A failed allocation must not surface as the error of the next launch.
template <class T>
T* or_null(cudaError_t error, T* made) {
  if (error == cudaSuccess) return made;
  cudaGetLastError();
  return nullptr;
}

char architecture[24];  // of the device, as nvcc names it, and the rung of the matrix kernels

__global__ void probe() {}  // present if this device's code is in the library

}  // namespace

const char* name() { return "cuda"; }
const char* variant() { return architecture; }

const char* init() {
  static char reason[512];
  int driver = 0, runtime = 0, count = 0, device = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::snprintf(reason, sizeof reason, "device: no usable GPU: %s (the driver supports CUDA %d.%d, this library was built with %d.%d)",
                  error == cudaSuccess ? "none found" : cudaGetErrorString(error), driver / 1000, driver % 1000 / 10,
                  runtime / 1000, runtime % 1000 / 10);
    return reason;
  }
  cudaDeviceProp properties;
  error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, probe);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    std::snprintf(reason, sizeof reason, "device: %s has compute capability %d.%d, for which this library holds no code",
                  properties.name, properties.major, properties.minor);
    return reason;
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);
  cuda::multiprocessors = properties.multiProcessorCount;
  const char* name = std::getenv("KDTREE_CUDA");
  if (!cuda::choose_rung(name)) {
    std::snprintf(reason, sizeof reason, "KDTREE_CUDA: %.64s: must be plain or stream", name);
    return reason;
  }
  std::snprintf(architecture, sizeof architecture, "sm_%d%d %s", properties.major, properties.minor,
                name ? name : "stream");
  for (const cuda::KernelInit* kernel = cuda::kernel_inits(); kernel->init; ++kernel) {
    error = static_cast<cudaError_t>(kernel->init());
    if (error == cudaSuccess) continue;
    if (cuda::kMaxSharedBytes > properties.sharedMemPerBlockOptin)
      std::snprintf(reason, sizeof reason, "%s: %s refuses %zu bytes of shared memory a block, it offers %zu", kernel->name,
                    properties.name, cuda::kMaxSharedBytes, properties.sharedMemPerBlockOptin);
    else
      std::snprintf(reason, sizeof reason, "%s: %s does not take the kernel: %s", kernel->name, properties.name,
                    cudaGetErrorString(error));
    return reason;
  }
  return nullptr;
}

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

void* allocate(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes ? bytes : 1);
  return or_null(error, memory);
}
void release(void* memory) { cudaFree(memory); }

void* allocate_host(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocHost(&memory, bytes ? bytes : 1);
  return or_null(error, memory);
}
void release_host(void* memory) { cudaFreeHost(memory); }

size_t free_bytes() {
  size_t free = 0, total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess ? free : 0;
}

Stream create_stream() {
  cudaStream_t stream = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return or_null(error, stream);
}
void destroy_stream(Stream stream) { cudaStreamDestroy(cuda_stream(stream)); }
int synchronize(Stream stream) { return cudaStreamSynchronize(cuda_stream(stream)); }

int upload(void* to, const void* from_host, size_t bytes, Stream stream) {
  return cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, cuda_stream(stream));
}
int download(void* to_host, const void* from, size_t bytes, Stream stream) {
  return cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, cuda_stream(stream));
}
int fill(void* to, int byte, size_t bytes, Stream stream) { return cudaMemsetAsync(to, byte, bytes, cuda_stream(stream)); }

Graph create_graph(int (*body)(void* context, Stream stream), void* context, Stream stream, int* error) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  *error = cudaStreamBeginCapture(cuda_stream(stream), cudaStreamCaptureModeThreadLocal);
  if (*error) return nullptr;
  const int body_error = body(context, stream);
  *error = cudaStreamEndCapture(cuda_stream(stream), &graph);
  if (body_error) *error = body_error;
  if (!*error) *error = cudaGraphInstantiate(&executable, graph);
  if (graph) cudaGraphDestroy(graph);
  return executable;
}
int launch_graph(Graph graph, Stream stream) {
  return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), cuda_stream(stream));
}
void destroy_graph(Graph graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

Event create_event() {
  cudaEvent_t event = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  return or_null(error, event);
}
int record(Event event, Stream stream) { return cudaEventRecord(cuda_event(event), cuda_stream(stream)); }
int wait(Event event) { return cudaEventSynchronize(cuda_event(event)); }
void destroy_event(Event event) { cudaEventDestroy(cuda_event(event)); }

}  // namespace kdtree::backend
