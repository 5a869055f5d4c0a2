// The backend of emulated kernels: host memory, no streams; a graph calls its body again.
#include "../../../engine/backend/backend.h"

#include <cstdlib>

#include "../../../engine/backend/cuda/table.h"
#include "../../../engine/ops/cuda/operator.cuh"

namespace kdtree::cuda {
int multiprocessors = 2;
Rung rung = Rung::kStream;
}

namespace kdtree::backend {
namespace {

struct Body {
  int (*call)(void* context, Stream stream);
  void* context;
};

}  // namespace

const char* name() { return "cuda"; }
const char* variant() { return "emulated"; }
const char* init() {
  if (!cuda::choose_rung(std::getenv("KDTREE_CUDA"))) return "KDTREE_CUDA: no rung";
  for (const cuda::KernelInit* kernel = cuda::kernel_inits(); kernel->init; ++kernel)
    if (kernel->init()) return kernel->name;
  return nullptr;
}
const char* error_text(int) { return "an emulated kernel failed"; }
void* allocate(size_t bytes) { return std::aligned_alloc(256, (bytes + 256) / 256 * 256); }
void release(void* memory) { std::free(memory); }
void* allocate_host(size_t bytes) { return allocate(bytes); }
void release_host(void* memory) { release(memory); }
size_t free_bytes() { return 0; }
Stream create_stream() { return nullptr; }
void destroy_stream(Stream) {}
int synchronize(Stream) { return 0; }
int upload(void* to, const void* from, size_t bytes, Stream) { return std::memcpy(to, from, bytes), 0; }
int download(void* to, const void* from, size_t bytes, Stream) { return std::memcpy(to, from, bytes), 0; }
int fill(void* to, int byte, size_t bytes, Stream) { return std::memset(to, byte, bytes), 0; }
Graph create_graph(int (*body)(void* context, Stream stream), void* context, Stream, int* error) {
  *error = 0;
  return new Body{body, context};
}
int launch_graph(Graph graph, Stream stream) {
  const auto* body = static_cast<const Body*>(graph);
  return body->call(body->context, stream);
}
void destroy_graph(Graph graph) { delete static_cast<Body*>(graph); }
Event create_event() { return nullptr; }
int record(Event, Stream) { return 0; }
int wait(Event) { return 0; }
void destroy_event(Event) {}

}  // namespace kdtree::backend
