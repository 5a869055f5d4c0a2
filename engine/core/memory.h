// Owners of backend memory. Running out is an error that says what was asked for and what there is.
#pragma once
#include <stdexcept>
#include <string>
#include <utility>

#include "../backend/backend.h"

namespace kdtree {

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

inline void check(int error, const char* what) {
  if (error) fail(std::string(what) + ": " + backend::error_text(error));
}

class Buffer {
 public:
  Buffer() = default;
  Buffer(size_t bytes, const std::string& what) : memory_(bytes ? backend::allocate(bytes) : nullptr) {
    if (bytes && !memory_)
      fail(what + ": " + std::to_string(bytes) + " bytes: out of memory, " + std::to_string(backend::free_bytes()) +
           " are free");
  }
  Buffer(Buffer&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~Buffer() {
    if (memory_) backend::release(memory_);
  }

  template <class T = void>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
};

}  // namespace kdtree
