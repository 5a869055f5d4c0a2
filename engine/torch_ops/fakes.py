"""What every operator returns for tensors without data (meta and fake tensors): shapes and dtypes only.

Imported by `load`, after the schemas. The size of packed weights is the backend's business (about that of the source,
rounded up to its tiles): unknown while tracing, that of the source on meta tensors.
"""

import torch
from torch.library import register_fake

INT, FLOAT = torch.int32, torch.float32


def _packed(*weights):
    size = sum(w.numel() * w.element_size() for w in weights)
    if not weights[0].is_meta:
        size = torch.library.get_ctx().new_dynamic_size()
    return weights[0].new_empty(size, dtype=torch.uint8)


@register_fake("kdtree::embed")
def _(tokens, table):
    return table.new_empty(tokens.shape[0], table.shape[1])


@register_fake("kdtree::rms_norm")
def _(x, weight, eps):
    return x.new_empty(x.shape)


@register_fake("kdtree::swiglu")
def _(gate_up):
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[2])


@register_fake("kdtree::argmax")
def _(x):
    return x.new_empty(x.shape[0], dtype=INT)


@register_fake("kdtree::rope")
def _(x, positions, cos, sin):
    return x.new_empty(x.shape)


@register_fake("kdtree::gemm_prepare")
def _(w, activations):
    return _packed(w)


@register_fake("kdtree::gemm")
def _(x, packed, n, w_type, add=None, out_type=None):
    return x.new_empty((*x.shape[:-1], n), dtype=out_type or x.dtype)


@register_fake("kdtree::w4a16_gemm_prepare")
def _(qw, sc, group, activations):
    return _packed(qw, sc)


@register_fake("kdtree::w4a16_gemm")
def _(x, packed, n, group, scale_type, add=None, out_type=None):
    return x.new_empty((x.shape[0], n), dtype=out_type or x.dtype)


@register_fake("kdtree::moe_route")
def _(logits, bias, top_k, n_group, topk_group, norm_topk_prob, scaling):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=INT), logits.new_empty(shape)


@register_fake("kdtree::moe_experts_prepare")
def _(gate, up, down, activations):
    return _packed(gate, up, down)


@register_fake("kdtree::moe_experts")
def _(x, experts, weights, packed, n_experts, intermediate, w_type, shared=None, residual=None):
    return x.new_empty(x.shape)


@register_fake("kdtree::w4a16_moe_experts_prepare")
def _(gate_qw, gate_sc, up_qw, up_sc, down_qw, down_sc, group, activations):
    return _packed(gate_qw, gate_sc, up_qw, up_sc, down_qw, down_sc)


@register_fake("kdtree::w4a16_moe_experts")
def _(x, experts, weights, packed, n_experts, intermediate, group, scale_type, shared=None, residual=None):
    return x.new_empty(x.shape)


@register_fake("kdtree::tree_attention")
def _(q_latent, q_rope, kv, prefix, parents, depths, softmax_scale):
    return q_latent.new_empty(q_latent.shape)


@register_fake("kdtree::tree_build")
def _(logits, root, budget):
    rows = (logits.new_empty(budget + 1, dtype=INT) for _ in range(3))
    top = (logits.shape[0], min(budget, logits.shape[1]))
    return *rows, logits.new_empty(1, dtype=INT), logits.new_empty(top, dtype=INT), logits.new_empty(top)


@register_fake("kdtree::tree_accept")
def _(state, tokens, parents, next_tokens, stop_ids, accepted_rows, output):
    return None


@register_fake("kdtree::kv_compact")
def _(state, accepted_rows, kv):
    return None


@register_fake("kdtree::draft_script")
def _(state, script, levels, vocab, kind, p, seed):
    return state.new_empty((levels, vocab), dtype=FLOAT)


@register_fake("kdtree::generate")
def _(prompt, stop_ids, script, engine, mode, max_new_tokens):
    return prompt.new_empty(max_new_tokens), prompt.new_empty(4)
