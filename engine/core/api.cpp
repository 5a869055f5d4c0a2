#include "api.h"

#include <memory>
#include <new>

#include "decoder.h"
#include "limits.h"

using kdtree::Decoder;
using kdtree::Operator;
namespace backend = kdtree::backend;

namespace kdtree {

const Operator* find_operator(const std::string& name) {
  for (const Operator* const* op = backend::operators(); *op; ++op)
    if (name == (*op)->name) return *op;
  return nullptr;
}

}  // namespace kdtree

struct kdtree_engine {
  Decoder decoder;
  std::string called;
};

namespace {

thread_local std::string last_error;

// Runs `body`; an exception becomes kdtree_error() and status 1.
template <class Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    last_error = "memory: host: out of memory";
    return 1;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

const Operator* as_operator(const kdtree_operator* op) { return reinterpret_cast<const Operator*>(op); }

}  // namespace

extern "C" {

const char* kdtree_error() { return last_error.c_str(); }
const char* kdtree_backend() { return backend::name(); }
const char* kdtree_variant() { return backend::variant(); }
int kdtree_init() {
  return guarded([] {
    if (const char* reason = backend::init()) kdtree::fail(reason);
  });
}

const kdtree_operator* kdtree_find_operator(const char* name) {
  return reinterpret_cast<const kdtree_operator*>(kdtree::find_operator(name));
}
const char* kdtree_refuse(const kdtree_operator* op, const void* shape) { return as_operator(op)->refuse(shape); }
size_t kdtree_packed_bytes(const kdtree_operator* op, const void* shape) {
  return as_operator(op)->packed_bytes(shape);
}
int kdtree_prepare(const kdtree_operator* op, const void* shape, const void* weights, void* packed) {
  return guarded([&] {
    kdtree::check(as_operator(op)->prepare(shape, weights, packed, nullptr), as_operator(op)->name);
    kdtree::check(backend::synchronize(nullptr), as_operator(op)->name);
  });
}
size_t kdtree_workspace(const kdtree_operator* op, const void* shape) { return as_operator(op)->workspace(shape); }
int kdtree_run(const kdtree_operator* op, const void* shape, const void* args, void* workspace) {
  return guarded([&] {
    kdtree::check(as_operator(op)->run(shape, args, workspace, nullptr), as_operator(op)->name);
    kdtree::check(backend::synchronize(nullptr), as_operator(op)->name);
  });
}
int kdtree_enqueue(const kdtree_operator* op, const void* shape, const void* args, void* workspace, void* stream) {
  return guarded([&] { kdtree::check(as_operator(op)->run(shape, args, workspace, stream), as_operator(op)->name); });
}

void* kdtree_allocate(size_t bytes) { return backend::allocate(bytes); }
void kdtree_release(void* memory) { backend::release(memory); }
int kdtree_upload(void* to, const void* from_host, size_t bytes) {
  return guarded([&] { kdtree::check(backend::upload(to, from_host, bytes, nullptr), "upload"); });
}
int kdtree_download(void* to_host, const void* from, size_t bytes) {
  return guarded([&] { kdtree::check(backend::download(to_host, from, bytes, nullptr), "download"); });
}

kdtree_engine* kdtree_create(const kdtree::ModelConfig* config, const kdtree::EngineOptions* options,
                             const kdtree::Tensor* tensors, int64_t count,
                             int32_t (*on_tensor)(void* user, int64_t index, int32_t done), void* user) {
  kdtree_engine* engine = nullptr;
  guarded([&] {
    kdtree::check_model(*config);
    kdtree::check_options(*options);
    engine = new kdtree_engine{{*config, *options, {tensors, count, on_tensor, user}}, {}};
  });
  return engine;
}
void kdtree_destroy(kdtree_engine* engine) { delete engine; }
int kdtree_generate(kdtree_engine* engine, const kdtree::Request* request,
                    int32_t (*on_round)(void* user, const kdtree::Round* round), void* user, kdtree::Result* result) {
  return guarded([&] { *result = engine->decoder.generate(*request, on_round, user); });
}
int kdtree_read_kv(kdtree_engine* engine, int64_t first, int64_t count, void* to) {
  return guarded([&] { engine->decoder.read_kv(first, count, to); });
}
const char* kdtree_called_operators(kdtree_engine* engine) {
  engine->called.clear();
  for (const std::string& name : engine->decoder.called_operators())
    engine->called += (engine->called.empty() ? "" : " ") + name;
  return engine->called.c_str();
}

}  // extern "C"
