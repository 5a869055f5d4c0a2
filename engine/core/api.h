// The C interface of a backend's library (libkdtree_<backend>.so); engine/native.py is its only caller.
// Functions return 0 on success; otherwise kdtree_error() tells why, in one line, on the calling thread.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

const char* kdtree_error();
const char* kdtree_backend();  // "cpu" or "cuda"
int kdtree_init();             // once, before anything else

// ---- one operator at a time: checks, benchmarks and the torch extension ------------------------------------------
struct kdtree_operator;  // kdtree::Operator
const kdtree_operator* kdtree_find_operator(const char* name);  // null if the backend has none of that name
const char* kdtree_refuse(const kdtree_operator* op, const void* shape);
size_t kdtree_packed_bytes(const kdtree_operator* op, const void* shape);
int kdtree_prepare(const kdtree_operator* op, const void* shape, const void* weights, void* packed);
size_t kdtree_workspace(const kdtree_operator* op, const void* shape);
int kdtree_run(const kdtree_operator* op, const void* shape, const void* args, void* workspace);  // waits for the end

void* kdtree_allocate(size_t bytes);
void kdtree_release(void* memory);
int kdtree_upload(void* to, const void* from_host, size_t bytes);
int kdtree_download(void* to_host, const void* from, size_t bytes);

}  // extern "C"
