#include "weights.h"

#include <cstring>
#include <unordered_map>

namespace kdtree {

bool is_moe_layer(const ModelConfig& config, int32_t layer) {
  return config.n_routed_experts > 0 && layer >= config.first_k_dense_replace && layer % config.moe_layer_freq == 0;
}

namespace {

float read_float(const Tensor& tensor, int64_t index) {
  if (tensor.type == kFloat32) return static_cast<const float*>(tensor.data)[index];
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(tensor.data)[index]} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t round_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace

class Loader {
 public:
  Loader(const ModelConfig& config, const EngineOptions& options, int32_t max_rows, const TensorSource& source,
         Operators& ops, backend::Stream stream)
      : config_(config),
        activations_(options.activations),
        max_rows_(max_rows),
        source_(source),
        ops_(ops),
        stream_(stream) {
    for (int64_t i = 0; i < source.count; ++i) tensors_[source.tensors[i].name] = &source.tensors[i];
  }

  Weights load() {
    Weights weights;
    weights.embedding = vector("model.embed_tokens.weight", config_.vocab_size, config_.hidden_size);
    for (int32_t i = 0; i < config_.num_hidden_layers; ++i) weights.layers.push_back(layer(i));
    weights.final_norm = vector("model.norm.weight", config_.hidden_size);
    weights.head = linear("lm_head", config_.vocab_size, config_.hidden_size, {config_.hidden_size, config_.vocab_size},
                          kFloat32);
    return weights;
  }

 private:
  Layer layer(int32_t index) {
    const ModelConfig& c = config_;
    const std::string prefix = "model.layers." + std::to_string(index) + ".", attention = prefix + "self_attn.";
    const int32_t heads = c.num_attention_heads, q_width = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim);
    const int32_t q_input = c.q_lora_rank ? c.q_lora_rank : c.hidden_size;
    Layer layer;
    layer.input_norm = vector(prefix + "input_layernorm.weight", c.hidden_size);
    if (c.q_lora_rank) {
      layer.q_a = linear(attention + "q_a_proj", c.q_lora_rank, c.hidden_size, {c.hidden_size, c.q_lora_rank});
      layer.q_norm = vector(attention + "q_a_layernorm.weight", c.q_lora_rank);
    }
    layer.q_b = linear(attention + (c.q_lora_rank ? "q_b_proj" : "q_proj"), q_width, q_input, {q_input, q_width});
    const int32_t kv_width = c.kv_lora_rank + c.qk_rope_head_dim;
    layer.kv_a = linear(attention + "kv_a_proj_with_mqa", kv_width, c.hidden_size, {c.hidden_size, kv_width});
    layer.kv_norm = vector(attention + "kv_a_layernorm.weight", c.kv_lora_rank);
    load_kv_b(attention + "kv_b_proj", layer);
    layer.o = linear(attention + "o_proj", c.hidden_size, heads * c.v_head_dim, {heads * c.v_head_dim, c.hidden_size});
    layer.post_norm = vector(prefix + "post_attention_layernorm.weight", c.hidden_size);
    layer.moe = is_moe_layer(c, index);
    if (!layer.moe) {
      layer.mlp = mlp(prefix + "mlp.", c.intermediate_size);
      return layer;
    }
    layer.router = linear(prefix + "mlp.gate", c.n_routed_experts, c.hidden_size, {c.hidden_size, c.n_routed_experts},
                          kFloat32);
    layer.router_bias = float_vector(prefix + "mlp.gate.e_score_correction_bias", c.n_routed_experts);
    layer.experts = experts(prefix + "mlp.experts.");
    if (c.n_shared_experts)
      layer.mlp = mlp(prefix + "mlp.shared_experts.", c.moe_intermediate_size * c.n_shared_experts);
    return layer;
  }

  Mlp mlp(const std::string& prefix, int32_t intermediate) {
    const int32_t hidden = config_.hidden_size;
    return {linear(prefix + "gate_proj", intermediate, hidden, {hidden, 2 * intermediate}),
            linear(prefix + "up_proj", intermediate, hidden, {hidden, 2 * intermediate}),
            linear(prefix + "down_proj", hidden, intermediate, {intermediate, hidden})};
  }

  const Tensor* find(const std::string& name) const {
    const auto at = tensors_.find(name);
    return at == tensors_.end() ? nullptr : at->second;
  }

  // Tensors opened in its lifetime may be read until it ends.
  class Reading {
   public:
    explicit Reading(Loader& loader) : loader_(loader), first_(loader.open_.size()) {}
    ~Reading() {
      for (; loader_.open_.size() > first_; loader_.open_.pop_back())
        loader_.source_.on_tensor(loader_.source_.user, loader_.open_.back(), 1);
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    Loader& loader_;
    size_t first_;
  };

  void open(const Tensor& tensor) {
    if (!source_.on_tensor) return;
    const int64_t index = &tensor - source_.tensors;
    if (source_.on_tensor(source_.user, index, 0)) fail(std::string(tensor.name) + ": data: cannot be read");
    open_.push_back(index);
  }

  const Tensor& tensor(const std::string& name, int64_t rows, int64_t cols) {
    const Tensor* found = find(name);
    if (!found) fail(name + ": missing: the config asks for this tensor");
    if (found->rows != rows || found->cols != cols)
      fail(name + ": shape: [" + std::to_string(found->rows) + ", " + std::to_string(found->cols) + "]: must be [" +
           std::to_string(rows) + ", " + std::to_string(cols) + "]");
    open(*found);
    return *found;
  }
  const Tensor& float_tensor(const std::string& name, int64_t rows, int64_t cols = 1) {
    const Tensor& found = tensor(name, rows, cols);
    if (found.type != kFloat32 && found.type != kBFloat16) fail(name + ": dtype " + std::to_string(found.type) + ": must be F32 or BF16");
    return found;
  }

  Buffer copy(const void* from, size_t bytes, const std::string& what) {
    Buffer buffer(bytes, what);
    check(backend::upload(buffer.as(), from, bytes, stream_), "upload");
    return buffer;
  }

  // Embeddings and norms, in the activation type.
  Buffer vector(const std::string& name, int64_t rows, int64_t cols = 1) {
    const Reading reading(*this);
    const Tensor& source = float_tensor(name, rows, cols);
    const size_t count = static_cast<size_t>(rows * cols);
    if (source.type == activations_) return copy(source.data, count * size_of(activations_), name);
    if (activations_ == kFloat32) return float_vector(name, rows, cols);
    std::vector<uint16_t> rounded(count);
    for (size_t i = 0; i < count; ++i) rounded[i] = round_to_bfloat16(read_float(source, static_cast<int64_t>(i)));
    return copy(rounded.data(), count * 2, name);
  }

  Buffer float_vector(const std::string& name, int64_t rows, int64_t cols = 1) {
    const Reading reading(*this);
    const Tensor& source = float_tensor(name, rows, cols);
    std::vector<float> values(static_cast<size_t>(rows * cols));
    for (size_t i = 0; i < values.size(); ++i) values[i] = read_float(source, static_cast<int64_t>(i));
    return copy(values.data(), values.size() * 4, name);
  }

  int32_t packed_type(const Tensor& source) const { return activations_ == kBFloat16 ? kBFloat16 : source.type; }

  Linear linear(const std::string& name, int32_t n, int32_t k, Linear::Strides strides, int32_t y_type = -1) {
    if (y_type < 0) y_type = activations_;
    const Reading reading(*this);
    Linear result;
    const Tensor* codes = find(name + ".qw");
    if (!codes) {
      const Tensor& source = float_tensor(name + ".weight", n, k);
      result.shape_ = {max_rows_, n, k, 1, strides.x, 0, strides.y, 0, activations_, y_type, packed_type(source)};
      pack(name, GemmWeights{source.data, source.type}, result);
      return result;
    }
    const int32_t group = config_.group_size;
    if (!group) fail(name + ".qw: INT4 codes: the config has no group_size");
    tensor(name + ".qw", n, k / 8);
    if (codes->type != kInt32) fail(name + ".qw: dtype " + std::to_string(codes->type) + ": must be I32");
    const Tensor& scales = float_tensor(name + ".sc", n, k / group);
    result.int4_ = true;
    result.int4_shape_ = {max_rows_, n, k, group, strides.x, strides.y, activations_, y_type, scales.type};
    ops_.w4a16_gemm.plan(result.int4_shape_);
    result.packed_ = Buffer(ops_.w4a16_gemm.packed_bytes(result.int4_shape_), name);
    ops_.w4a16_gemm.prepare(result.int4_shape_,
                            W4a16GemmWeights{static_cast<const int32_t*>(codes->data), scales.data},
                            result.packed_.as(), stream_);
    return result;
  }

  void pack(const std::string& name, const GemmWeights& weights, Linear& linear) {
    ops_.gemm.plan(linear.shape_);
    linear.packed_ = Buffer(ops_.gemm.packed_bytes(linear.shape_), name);
    ops_.gemm.prepare(linear.shape_, weights, linear.packed_.as(), stream_);
  }

  // kv_b_proj's rows are, head by head, `nope` rows of W_UK and `v` rows of W_UV.
  void load_kv_b(const std::string& name, Layer& layer) {
    const Reading reading(*this);
    const ModelConfig& c = config_;
    const int32_t heads = c.num_attention_heads, nope = c.qk_nope_head_dim, v = c.v_head_dim, rank = c.kv_lora_rank;
    const Tensor& source = float_tensor(name + ".weight", int64_t{heads} * (nope + v), rank);
    std::vector<float> uk(static_cast<size_t>(heads) * rank * nope), uv(static_cast<size_t>(heads) * v * rank);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = 0; r < rank; ++r) {
        for (int64_t d = 0; d < nope; ++d)
          uk[static_cast<size_t>((h * rank + r) * nope + d)] = read_float(source, (h * (nope + v) + d) * rank + r);
        for (int64_t d = 0; d < v; ++d)
          uv[static_cast<size_t>((h * v + d) * rank + r)] = read_float(source, (h * (nope + v) + nope + d) * rank + r);
      }
    const int32_t q_head = nope + c.qk_rope_head_dim, w = packed_type(source);
    layer.uk.shape_ = {max_rows_, rank, nope, heads, heads * q_head, q_head, heads * rank, rank, activations_,
                       activations_, w};
    layer.uv.shape_ = {max_rows_, v, rank, heads, heads * rank, rank, heads * v, v, activations_, activations_, w};
    pack(name + " (W_UK)", GemmWeights{uk.data(), kFloat32}, layer.uk);
    pack(name + " (W_UV)", GemmWeights{uv.data(), kFloat32}, layer.uv);
  }

  Experts experts(const std::string& prefix) {
    Experts result;
    result.int4_ = find(prefix + "0.gate_proj.qw") != nullptr;
    for (int32_t e = 0; e < config_.n_routed_experts; ++e) {
      const std::string name = prefix + std::to_string(e) + ".";
      if (result.int4_)
        pack_int4_expert(name, e, result);
      else
        pack_expert(name, e, result);
    }
    return result;
  }

  void pack_expert(const std::string& name, int32_t expert, Experts& experts) {
    const Reading reading(*this);
    const ModelConfig& c = config_;
    const Tensor& gate = float_tensor(name + "gate_proj.weight", c.moe_intermediate_size, c.hidden_size);
    const Tensor& up = float_tensor(name + "up_proj.weight", c.moe_intermediate_size, c.hidden_size);
    const Tensor& down = float_tensor(name + "down_proj.weight", c.hidden_size, c.moe_intermediate_size);
    if (expert == 0) {
      experts.shape_ = {max_rows_,           c.hidden_size, c.moe_intermediate_size, c.n_routed_experts,
                        c.num_experts_per_tok, activations_,  packed_type(gate)};
      ops_.moe_experts.plan(experts.shape_);
      experts.packed_ = Buffer(ops_.moe_experts.packed_bytes(experts.shape_), name + "…");
    }
    if (up.type != gate.type || down.type != gate.type || packed_type(gate) != experts.shape_.w_type)
      fail(name + "gate_proj.weight: dtype: all experts of a layer must have one");
    ops_.moe_experts.prepare(experts.shape_, MoeExpertsWeights{expert, gate.type, gate.data, up.data, down.data},
                             experts.packed_.as(), stream_);
  }

  void pack_int4_expert(const std::string& name, int32_t expert, Experts& experts) {
    const Reading reading(*this);
    const ModelConfig& c = config_;
    const int32_t hidden = c.hidden_size, width = c.moe_intermediate_size, group = c.group_size;
    if (!group) fail(name + "gate_proj.qw: INT4 codes: the config has no group_size");
    const auto codes = [&](const char* which, int32_t n, int32_t k) {
      const Tensor& found = tensor(name + which + ".qw", n, k / 8);
      if (found.type != kInt32) fail(name + which + ".qw: dtype " + std::to_string(found.type) + ": must be I32");
      return static_cast<const int32_t*>(found.data);
    };
    const Tensor& gate_sc = float_tensor(name + "gate_proj.sc", width, hidden / group);
    const Tensor& up_sc = float_tensor(name + "up_proj.sc", width, hidden / group);
    const Tensor& down_sc = float_tensor(name + "down_proj.sc", hidden, width / group);
    if (expert == 0) {
      experts.int4_shape_ = {max_rows_, hidden, width, c.n_routed_experts, c.num_experts_per_tok, group, activations_,
                             gate_sc.type};
      ops_.w4a16_moe_experts.plan(experts.int4_shape_);
      experts.packed_ = Buffer(ops_.w4a16_moe_experts.packed_bytes(experts.int4_shape_), name + "…");
    }
    if (gate_sc.type != experts.int4_shape_.scale_type || up_sc.type != gate_sc.type || down_sc.type != gate_sc.type)
      fail(name + "gate_proj.sc: dtype: all scales of a layer's experts must have one");
    ops_.w4a16_moe_experts.prepare(
        experts.int4_shape_,
        W4a16MoeExpertsWeights{expert, codes("gate_proj", width, hidden), gate_sc.data, codes("up_proj", width, hidden),
                               up_sc.data, codes("down_proj", hidden, width), down_sc.data},
        experts.packed_.as(), stream_);
  }

  const ModelConfig& config_;
  int32_t activations_;
  int32_t max_rows_;
  const TensorSource& source_;
  Operators& ops_;
  backend::Stream stream_;
  std::unordered_map<std::string, const Tensor*> tensors_;
  std::vector<int64_t> open_;  // indices of the tensors being read
};

Weights load_weights(const ModelConfig& config, const EngineOptions& options, int32_t max_rows,
                     const TensorSource& source, Operators& ops, backend::Stream stream) {
  return Loader(config, options, max_rows, source, ops, stream).load();
}

}  // namespace kdtree
