// The C interface of a backend's library (libkdtree_<backend>.so); engine/native.py is its only caller.
// Functions return 0 on success; otherwise kdtree_error() tells why, in one line, on the calling thread.
#pragma once
#include <cstddef>
#include <cstdint>

#include "config.h"

extern "C" {

const char* kdtree_error();
const char* kdtree_backend();  // "cpu" or "cuda"
int kdtree_init();             // once, before anything else
const char* kdtree_variant();  // once initialised: the CPU's instruction set ("avx2") or the GPU's architecture ("sm_90")

// ---- one operator at a time: checks, benchmarks and the torch extension ------------------------------------------
struct kdtree_operator;  // kdtree::Operator
const kdtree_operator* kdtree_find_operator(const char* name);  // null if the backend has none of that name
const char* kdtree_refuse(const kdtree_operator* op, const void* shape);
size_t kdtree_packed_bytes(const kdtree_operator* op, const void* shape);
int kdtree_prepare(const kdtree_operator* op, const void* shape, const void* weights, void* packed);
size_t kdtree_workspace(const kdtree_operator* op, const void* shape);
int kdtree_run(const kdtree_operator* op, const void* shape, const void* args, void* workspace);  // waits for the end
// Issues the operator on a stream of the backend (a cudaStream_t; null on the CPU) and does not wait.
int kdtree_enqueue(const kdtree_operator* op, const void* shape, const void* args, void* workspace, void* stream);

void* kdtree_allocate(size_t bytes);
void kdtree_release(void* memory);
int kdtree_upload(void* to, const void* from_host, size_t bytes);
int kdtree_download(void* to_host, const void* from, size_t bytes);

// ---- the engine --------------------------------------------------------------------------------------------------
struct kdtree_engine;
// Copies and packs the weights, tensor by tensor: their memory may go once this returns. Null on error. on_tensor may be
// null. It is called when the data of tensors[index] are about to be read (done = 0; it may set them only now, and
// answers non-zero to give up) and when they will not be read again (done = 1).
kdtree_engine* kdtree_create(const kdtree::ModelConfig* config, const kdtree::EngineOptions* options,
                             const kdtree::Tensor* tensors, int64_t count,
                             int32_t (*on_tensor)(void* user, int64_t index, int32_t done), void* user);
void kdtree_destroy(kdtree_engine* engine);
// on_round may be null; it is called on the calling thread after every round, and ends the run by a non-zero answer.
int kdtree_generate(kdtree_engine* engine, const kdtree::Request* request,
                    int32_t (*on_round)(void* user, const kdtree::Round* round), void* user, kdtree::Result* result);
// Rows first, …, first + count - 1 of every layer's KV pool: to is [layers, count, kv_lora_rank + rope].
int kdtree_read_kv(kdtree_engine* engine, int64_t first, int64_t count, void* to);
// Names of the operators the engine has called so far, separated by spaces; valid until the next call.
const char* kdtree_called_operators(kdtree_engine* engine);

}  // extern "C"
