// What a backend offers to the core: memory, copies, graphs and its table of operators. One library per backend;
// the core is linked with exactly one. Functions that return int give 0, or an error that error_text() explains.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../ops/operator.h"

namespace kdtree::backend {

using Stream = void*;  // null on the CPU
using Event = void*;
using Graph = void*;

const char* name();
const char* variant();  // what the operators were made for: the CPU's instruction set, the GPU's architecture; after init()

// Everything that must precede graph capture: picks the device, sets kernel attributes. Null, or why it cannot run.
const char* init();
const char* error_text(int error);

void* allocate(size_t bytes);       // backend memory, 256-byte aligned; null when there is none left
void release(void* memory);
void* allocate_host(size_t bytes);  // host memory that asynchronous copies may use (pinned); null when none is left
void release_host(void* memory);
size_t free_bytes();                // of backend memory, for error messages

Stream create_stream();
void destroy_stream(Stream stream);
int synchronize(Stream stream);

// In stream order. With plain host memory the host waits; with allocate_host memory the call may return at once.
int upload(void* to, const void* from_host, size_t bytes, Stream stream);
int download(void* to_host, const void* from, size_t bytes, Stream stream);
int fill(void* to, int byte, size_t bytes, Stream stream);

// A recorded sequence of operator calls. `body` issues them on `stream` and returns 0 or an error; a backend without
// graphs keeps `body` and calls it on every launch. Null on error, with *error set.
Graph create_graph(int (*body)(void* context, Stream stream), void* context, Stream stream, int* error);
int launch_graph(Graph graph, Stream stream);
void destroy_graph(Graph graph);

Event create_event();
int record(Event event, Stream stream);
int wait(Event event);  // the host waits
void destroy_event(Event event);

// The backend's operators, in the order of the ladder; ends with null.
const Operator* const* operators();

}  // namespace kdtree::backend
