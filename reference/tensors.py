"""Hugging Face names and shapes of a model's tensors, and which of them INT4 replaces."""

from reference.config import ModelConfig

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def tensor_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape ([out, in] of a matrix) of every tensor of the float model."""
    heads, hidden, expert_width = c.num_attention_heads, c.hidden_size, c.moe_intermediate_size
    q_input = c.q_lora_rank or hidden
    shapes = {"model.embed_tokens.weight": (c.vocab_size, hidden)}
    for layer in range(c.num_hidden_layers):
        p, a = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        shapes[p + "input_layernorm.weight"] = (hidden,)
        if c.q_lora_rank:
            shapes[a + "q_a_proj.weight"] = (c.q_lora_rank, hidden)
            shapes[a + "q_a_layernorm.weight"] = (c.q_lora_rank,)
        shapes[a + ("q_b_proj" if c.q_lora_rank else "q_proj") + ".weight"] = (heads * c.qk_head_dim, q_input)
        shapes[a + "kv_a_proj_with_mqa.weight"] = (c.kv_width, hidden)
        shapes[a + "kv_a_layernorm.weight"] = (c.kv_lora_rank,)
        shapes[a + "kv_b_proj.weight"] = (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        shapes[a + "o_proj.weight"] = (hidden, heads * c.v_head_dim)
        shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        if c.is_moe(layer):
            shapes[p + "mlp.gate.weight"] = (c.n_routed_experts, hidden)
            shapes[p + "mlp.gate.e_score_correction_bias"] = (c.n_routed_experts,)
            for expert in range(c.n_routed_experts):
                shapes |= _mlp(f"{p}mlp.experts.{expert}.", expert_width, hidden)
            if c.n_shared_experts:
                shapes |= _mlp(p + "mlp.shared_experts.", expert_width * c.n_shared_experts, hidden)
        else:
            shapes |= _mlp(p + "mlp.", c.intermediate_size, hidden)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (c.vocab_size, hidden)}


def _mlp(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}{projection}.weight" for projection in PROJECTIONS)
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def is_quantised(name: str) -> bool:
    """INT4 takes gate, up and down of dense MLPs, routed and shared experts; all else stays float."""
    return name.endswith(tuple(f".{projection}.weight" for projection in PROJECTIONS))
