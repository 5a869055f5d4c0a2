import pytest

from reference.config import ModelConfig, Yarn


def config(small_model, **changes):
    fields = {name: value for name, value in (small_model | changes).items() if value is not ...}
    return ModelConfig.from_dict(fields)


def test_reads_both_spellings_of_rope(small_model):
    old = config(small_model)
    rope = dict(small_model["rope_scaling"], rope_type="yarn", rope_theta=small_model["rope_theta"])
    del rope["type"]
    assert config(small_model, rope_scaling=..., rope_theta=..., rope_parameters=rope) == old
    assert old.yarn == Yarn(factor=8.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0)


def test_reads_nested_text_config(small_model):
    nested = {"model_type": "kimi_k25", "tie_word_embeddings": True, "text_config": small_model}
    assert ModelConfig.from_dict(nested) == config(small_model)


@pytest.mark.parametrize("rope", [None, {}, ..., {"type": "default"}])
def test_no_rope_scaling(small_model, rope):
    assert config(small_model, rope_scaling=rope).yarn is None


def test_null_in_rope_is_absent(small_model):
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": None, "mscale": None}
    assert config(small_model, rope_scaling=rope).yarn == Yarn(4.0, 16)


def test_no_q_lora(small_model):
    assert config(small_model, q_lora_rank=None).q_lora_rank is None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"hidden_size": ...}, "hidden_size: missing: needed"),
        ({"q_lora_rank": ...}, "q_lora_rank: missing: needed"),
        ({"hidden_size": None}, "hidden_size: None: must be an integer"),
        ({"hidden_size": "32"}, "hidden_size: 32: must be an integer"),
        ({"hidden_size": True}, "hidden_size: True: must be an integer"),
        ({"hidden_size": 32.5}, "hidden_size: 32.5: must be an integer"),
        ({"hidden_size": 0}, "hidden_size: 0: must be positive"),
        ({"q_lora_rank": 0}, "q_lora_rank: 0: must be positive"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: -1: must be positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan: must be a finite number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: 1: must be true or false"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: 7: must be even"),
        ({"n_group": 3}, "n_group: 3: must divide n_routed_experts (4)"),
        ({"n_group": 4}, "n_group: 4: leaves one expert a group; a score needs two"),
        ({"topk_group": 3}, "topk_group: 3: exceeds n_group (2)"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok: 3: exceeds the 2 experts of topk_group groups"),
        ({"num_key_value_heads": 1}, "num_key_value_heads: 1: must equal num_attention_heads (2)"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu: only 'silu' is supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: True: only False is supported"),
        ({"scoring_func": "softmax"}, "scoring_func: softmax: only 'sigmoid' is supported"),
        ({"rope_theta": 1.0}, "rope_theta: 1.0: must exceed 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling: yarn: must be a map"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type: linear: only default and yarn are supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor: missing: needed"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 0, "original_max_position_embeddings": 8}},
            "rope_parameters.factor: 0: must be positive",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "truncate": False}},
            "rope_scaling.truncate: False: not supported",
        ),
    ],
)
def test_refuses(small_model, changes, error):
    with pytest.raises(ValueError) as caught:
        config(small_model, **changes)
    assert str(caught.value) == error


def test_moe_layers(small_model):
    c = config(small_model, num_hidden_layers=7, first_k_dense_replace=2, moe_layer_freq=2)
    assert [layer for layer in range(7) if c.is_moe(layer)] == [2, 4, 6]
