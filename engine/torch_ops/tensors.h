// What every binding needs: checks that name operator, argument and reason; outputs; one call of a native operator.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "../core/api.h"
#include "../ops/operator.h"

namespace kdtree::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

constexpr int64_t kAny = -1;

inline const char* name_of(ScalarType type) { return torch::headeronly::toString(type); }

inline int32_t element_type(ScalarType type) { return type == ScalarType::BFloat16 ? kBFloat16 : kFloat32; }
inline ScalarType scalar_type(int32_t type) { return type == kBFloat16 ? ScalarType::BFloat16 : ScalarType::Float; }

// A native operator, the tensors it is called with, and where its outputs go.
class Call {
 public:
  // `first` fixes the device that all other tensors must be on.
  Call(const char* op, const Tensor& first) : op_(op), device_(first.device()), handle_(kdtree_find_operator(op)) {
    static const Device initialised = device_;  // the backend's device is the one that is current when it is initialised
    require(device_ == initialised, "device", "must be that of the first call in this process");
    if (!device_.is_cpu()) guard_.emplace(device_.index());
    static const int failed = kdtree_init();
    if (failed) throw_error(kdtree_error());
  }

  [[noreturn]] void throw_error(const std::string& what) const {
    throw std::runtime_error(std::string("kdtree::") + op_ + ": " + what);
  }
  void require(bool holds, const char* name, const std::string& reason) const {
    if (!holds) throw_error(std::string(name) + ": " + reason);
  }

  // A contiguous tensor of this type and these sizes; kAny fits every size.
  void check(const char* name, const Tensor& x, ScalarType type, const Sizes& sizes) const {
    check_strided(name, x, type, sizes);
    require(x.is_contiguous(), name, "must be contiguous");
  }
  // The same, but only the last dimension must be dense.
  void check_strided(const char* name, const Tensor& x, ScalarType type, const Sizes& sizes) const {
    require(x.device() == device_, name, "must be on the device of the first tensor");
    require(x.scalar_type() == type, name,
            std::string("must be ") + name_of(type) + ", is " + name_of(x.scalar_type()));
    require(x.dim() == static_cast<int64_t>(sizes.size()), name,
            "must have " + std::to_string(sizes.size()) + " dimensions, has " + std::to_string(x.dim()));
    for (size_t d = 0; d < sizes.size(); ++d)
      require(sizes[d] == kAny || x.size(d) == sizes[d], name,
              "dimension " + std::to_string(d) + " must be " + std::to_string(sizes[d]) + ", is " +
                  std::to_string(x.size(d)));
    require(sizes.empty() || x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) <= 1, name,
            "the last dimension must be contiguous");
  }
  // float32 or bfloat16, whichever it is.
  ScalarType floating(const char* name, const Tensor& x) const {
    const ScalarType type = x.scalar_type();
    require(type == ScalarType::Float || type == ScalarType::BFloat16, name,
            std::string("must be Float or BFloat16, is ") + name_of(type));
    return type;
  }
  // Indices in low … high - 1. Read on the CPU only: elsewhere it would make the host wait.
  void check_range(const char* name, const Tensor& x, int64_t low, int64_t high) const {
    if (!x.is_cpu()) return;
    const auto* values = static_cast<const int32_t*>(x.const_data_ptr());
    for (int64_t i = 0; i < x.numel(); ++i)
      require(low <= values[i] && values[i] < high, name,
              "entry " + std::to_string(i) + " is " + std::to_string(values[i]) + ", must lie in " +
                  std::to_string(low) + ".." + std::to_string(high - 1));
  }
  int32_t narrow(const char* name, int64_t value) const {
    require(value >= INT32_MIN && value <= INT32_MAX, name, std::to_string(value) + " does not fit 32 bits");
    return static_cast<int32_t>(value);
  }

  Tensor empty(const Sizes& sizes, ScalarType type) const {
    return torch::stable::empty(sizes, type, std::nullopt, device_);
  }
  Tensor full(const Sizes& sizes, int64_t value) const {
    return torch::stable::full(sizes, static_cast<double>(value), ScalarType::Int, std::nullopt, device_);
  }

  Tensor to_device(const Tensor& x) const { return x.device() == device_ ? x : torch::stable::to(x, device_); }

  // An int32 in the backend's memory, alive as long as this call.
  int32_t* scalar(int64_t value) {
    kept_.push_back(full({1}, value));
    return static_cast<int32_t*>(kept_.back().mutable_data_ptr());
  }

  template <class Shape>
  void accept(const Shape& shape) const {
    if (!handle_) throw_error("no such operator in this backend");
    if (const char* reason = kdtree_refuse(handle_, &shape)) throw_error(reason);
  }
  template <class Shape>
  Tensor allocate_packed(const Shape& shape) const {
    accept(shape);
    return empty({static_cast<int64_t>(kdtree_packed_bytes(handle_, &shape))}, ScalarType::Byte);
  }
  template <class Shape, class Weights>
  void prepare(const Shape& shape, const Weights& weights, const Tensor& packed) const {
    finish_queued();
    if (kdtree_prepare(handle_, &shape, &weights, packed.mutable_data_ptr())) throw_error(kdtree_error());
  }
  template <class Shape>
  void check_packed(const Tensor& packed, const Shape& shape) const {
    accept(shape);
    check("packed", packed, ScalarType::Byte, {static_cast<int64_t>(kdtree_packed_bytes(handle_, &shape))});
  }
  // On torch's current stream, behind what torch has queued there; the host does not wait, so a graph can be captured.
  // Workspace and outputs belong to that stream: torch reuses their memory only behind this call.
  template <class Shape, class Args>
  void run(const Shape& shape, const Args& args) const {
    accept(shape);
    const Tensor workspace = empty({static_cast<int64_t>(kdtree_workspace(handle_, &shape))}, ScalarType::Byte);
    if (kdtree_enqueue(handle_, &shape, &args, workspace.mutable_data_ptr(), current_stream()))
      throw_error(kdtree_error());
  }

 private:
  void* current_stream() const {
    void* stream = nullptr;
#ifdef USE_CUDA
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_.index(), &stream));
#endif
    return stream;
  }
  // Preparing runs on a stream of its own and ends before it returns; what torch has queued must be done first.
  void finish_queued() const {
#ifdef USE_CUDA
    TORCH_ERROR_CODE_CHECK(torch_cuda_stream_synchronize(current_stream(), device_.index()));
#endif
  }

  const char* op_;
  Device device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  const kdtree_operator* handle_;
  std::vector<Tensor> kept_;
};

// Weights are packed from host memory.
inline Tensor on_host(const Tensor& x) {
  return x.is_cpu() ? x : torch::stable::to(x, Device(torch::headeronly::DeviceType::CPU));
}

inline Tensor host_full(const Sizes& sizes, int64_t value) {
  return torch::stable::full(sizes, static_cast<double>(value), ScalarType::Int, std::nullopt,
                             Device(torch::headeronly::DeviceType::CPU));
}

template <class T>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}
inline const void* data(const std::optional<Tensor>& x) { return x ? x->const_data_ptr() : nullptr; }

}  // namespace kdtree::torch_ops
