// The CPU backend: plain memory, no streams, and "graphs" that call their body.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "../backend.h"
#include "path.h"

namespace kdtree::backend {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kLarge = size_t{1} << 26;  // what is smaller is not worth asking for

struct Body {
  int (*call)(void* context, Stream stream);
  void* context;
};

}  // namespace

const char* name() { return "cpu"; }
const char* variant() { return cpu::path_name(); }
const char* init() { return cpu::choose_path(); }
const char* error_text(int) { return "the CPU backend reported an error"; }

// Linux promises memory that it does not have and kills who uses it; so a large piece must be there now.
void* allocate(size_t bytes) {
  void* memory = nullptr;
  if (bytes > kLarge && bytes > free_bytes()) return nullptr;
  const bool huge = bytes >= 2 * kHugePage;
  if (posix_memalign(&memory, huge ? kHugePage : kAlignment, bytes ? bytes : 1)) return nullptr;
  if (huge) madvise(memory, bytes, MADV_HUGEPAGE);  // weights: first touched at once, then read all the time
  return memory;
}
void release(void* memory) { std::free(memory); }
void* allocate_host(size_t bytes) { return allocate(bytes); }
void release_host(void* memory) { release(memory); }
// What new allocations may use without swapping, caches included.
size_t free_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  for (size_t kilobytes; file >> key >> kilobytes && std::getline(file, unit);)
    if (key == "MemAvailable:") return kilobytes * 1024;
  return SIZE_MAX;
}

Stream create_stream() { return nullptr; }
void destroy_stream(Stream) {}
int synchronize(Stream) { return 0; }

int upload(void* to, const void* from_host, size_t bytes, Stream) {
  std::memcpy(to, from_host, bytes);
  return 0;
}
int download(void* to_host, const void* from, size_t bytes, Stream) {
  std::memcpy(to_host, from, bytes);
  return 0;
}
int fill(void* to, int byte, size_t bytes, Stream) {
  std::memset(to, byte, bytes);
  return 0;
}

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
