"""config.json of Kimi-K2.6, as far as it decides the model."""

from tests.checkpoint import release

TEXT = {
    "model_type": "kimi_k2",
    "dtype": "bfloat16",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "rope_scaling": release.MODEL["rope_scaling"] | {"original_max_position_embeddings": 4096},
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "vocab_size": 163840,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "quantization_config": release.QUANTIZATION,
}

CONFIG = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": TEXT}
