// A model's weights in the backend's memory, packed by the operators that use them.
#pragma once
#include <string>
#include <vector>

#include "config.h"
#include "operators.h"

namespace kdtree {

// y = add + x @ W^T, float or INT4: whichever the bundle holds under this name. Layer code never knows.
class Linear {
 public:
  // The rows of x and y may be parts of longer ones: strides in elements.
  struct Strides {
    int32_t x, y;
  };

  void run(Operators& ops, const int32_t* n_rows, const void* x, const void* add, void* y,
           backend::Stream stream) const {
    if (int4_)
      ops.w4a16_gemm(int4_shape_, {n_rows, x, packed_.as(), add, y}, stream);
    else
      ops.gemm(shape_, {n_rows, x, packed_.as(), add, y}, stream);
  }

 private:
  friend class Loader;
  bool int4_ = false;
  GemmShape shape_{};
  W4a16GemmShape int4_shape_{};
  Buffer packed_;
};

class Experts {
 public:
  void run(Operators& ops, const int32_t* n_rows, const void* x, const int32_t* experts, const float* weights,
           const void* shared, const void* residual, void* y, backend::Stream stream) const {
    if (int4_)
      ops.w4a16_moe_experts(int4_shape_, {n_rows, x, experts, weights, packed_.as(), shared, residual, y}, stream);
    else
      ops.moe_experts(shape_, {n_rows, x, experts, weights, packed_.as(), shared, residual, y}, stream);
  }

 private:
  friend class Loader;
  bool int4_ = false;
  MoeExpertsShape shape_{};
  W4a16MoeExpertsShape int4_shape_{};
  Buffer packed_;
};

struct Mlp {
  Linear gate, up, down;
};

struct Layer {
  Buffer input_norm, q_norm, kv_norm, post_norm;
  Linear q_a, q_b;    // without q_lora: q_b alone, on the hidden state
  Linear kv_a;
  Linear uk, uv;      // kv_b's two halves, one product per head: W_UK^T [heads, kv_lora, nope], W_UV [heads, v, kv_lora]
  Linear o;
  bool moe = false;
  Mlp mlp;            // the dense MLP, or the shared experts
  Linear router;
  Buffer router_bias;
  Experts experts;
};

struct Weights {
  Buffer embedding, final_norm;
  std::vector<Layer> layers;
  Linear head;
};

// The host's tensors, and the call that tells it which are being read (see kdtree_create).
struct TensorSource {
  const Tensor* tensors;
  int64_t count;
  int32_t (*on_tensor)(void* user, int64_t index, int32_t done);
  void* user;
};

// Builds the weights tensor by tensor; `max_rows` is the most rows of any call. Throws naming the tensor at fault.
Weights load_weights(const ModelConfig& config, const EngineOptions& options, int32_t max_rows,
                     const TensorSource& source, Operators& ops, backend::Stream stream);

bool is_moe_layer(const ModelConfig& config, int32_t layer);

}  // namespace kdtree
