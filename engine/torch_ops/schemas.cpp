// The schemas of torch.ops.kdtree, once for all backends: the CPU extension holds them, and every other backend's
// extension is loaded after it (engine/torch_ops/__init__.py). Names and arguments are those of the numpy twins
// (reference/ops.py); weights are packed once by the …_prepare operators.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(kdtree, m) {
  m.def("embed(Tensor tokens, Tensor table) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.def("argmax(Tensor x) -> Tensor");
  m.def("rope(Tensor x, Tensor positions, Tensor cos, Tensor sin) -> Tensor");

  // x [rows, k] or [rows, batch, k]; w [n, k] or [batch, n, k].
  m.def("gemm_prepare(Tensor w, ScalarType activations) -> Tensor");
  m.def("gemm(Tensor x, Tensor packed, int n, ScalarType w_type, Tensor? add=None, ScalarType? out_type=None) -> Tensor");
  m.def("w4a16_gemm_prepare(Tensor qw, Tensor sc, int group, ScalarType activations) -> Tensor");
  m.def("w4a16_gemm(Tensor x, Tensor packed, int n, int group, ScalarType scale_type, Tensor? add=None, "
        "ScalarType? out_type=None) -> Tensor");

  m.def("moe_route(Tensor logits, Tensor bias, int top_k, int n_group, int topk_group, bool norm_topk_prob, "
        "float scaling) -> (Tensor, Tensor)");
  m.def("moe_experts_prepare(Tensor gate, Tensor up, Tensor down, ScalarType activations) -> Tensor");
  m.def("moe_experts(Tensor x, Tensor experts, Tensor weights, Tensor packed, int n_experts, int intermediate, "
        "ScalarType w_type, Tensor? shared=None, Tensor? residual=None) -> Tensor");
  m.def("w4a16_moe_experts_prepare(Tensor gate_qw, Tensor gate_sc, Tensor up_qw, Tensor up_sc, Tensor down_qw, "
        "Tensor down_sc, int group, ScalarType activations) -> Tensor");
  m.def("w4a16_moe_experts(Tensor x, Tensor experts, Tensor weights, Tensor packed, int n_experts, int intermediate, "
        "int group, ScalarType scale_type, Tensor? shared=None, Tensor? residual=None) -> Tensor");

  m.def("tree_attention(Tensor q_latent, Tensor q_rope, Tensor kv, int prefix, Tensor parents, Tensor depths, "
        "float softmax_scale) -> Tensor");
  // -> tokens, parents, depths (-1 past the tree), n_rows [1], top_tokens, top_log_probs.
  m.def("tree_build(Tensor logits, int root, int budget) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // state: the int32 fields of DecodeState (engine/ops/decode_state.h).
  m.def("tree_accept(Tensor(a!) state, Tensor(b!) tokens, Tensor parents, Tensor next_tokens, Tensor stop_ids, "
        "Tensor(c!) accepted_rows, Tensor(d!) output) -> ()");
  m.def("kv_compact(Tensor state, Tensor accepted_rows, Tensor(a!) kv) -> ()");
  m.def("draft_script(Tensor state, Tensor script, int levels, int vocab, int kind, float p, int seed) -> Tensor");

  // engine: the address of a kdtree_engine of the same library. -> tokens [max_new_tokens], -1 past the end; generated,
  // committed, steps and stop reason (the fields of Result, engine/core/config.h).
  m.def("generate(Tensor prompt, Tensor stop_ids, Tensor script, int engine, int mode, int max_new_tokens) "
        "-> (Tensor, Tensor)");
}
