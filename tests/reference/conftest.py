import pytest

from reference.weights import generate_bundle

# Every term of the forward pass at its smallest: a dense and two MoE layers, two groups, a bias, a shared expert.
SMALL = {
    "seed": 5,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 64,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.fixture
def small_model() -> dict:
    return dict(SMALL)


@pytest.fixture(scope="session")
def small_bundle():
    return generate_bundle(SMALL, "float32")
