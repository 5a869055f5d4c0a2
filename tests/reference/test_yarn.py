"""YaRN against the published numbers of the Kimi-K2 family (read off transformers)."""

import math

import numpy as np
import pytest

from reference.config import ModelConfig
from reference.rope import attention_factor, inv_freq, rope_tables, softmax_scale

K2 = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 50000.0,
}


def k2(factor: float, beta_fast: float, **yarn) -> ModelConfig:
    scaling = {"type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": 1.0, "mscale": 1.0,
               "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}  # fmt: skip
    return ModelConfig.from_dict(K2 | {"rope_scaling": scaling | yarn})


KIMI_K2_6, KIMI_K2_THINKING, KIMI_K2_INSTRUCT = k2(64.0, 32.0), k2(64.0, 1.0), k2(32.0, 1.0)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (KIMI_K2_6, [1, 0.0668740347, 0.00446584867, 0.000158374969, 1.80702336e-5, 4.38220638e-7]),
        (KIMI_K2_THINKING, [1, 0.0668740347, 0.00879428629, 0.00162175996, 1.80702336e-5, 4.38220638e-7]),
        (KIMI_K2_INSTRUCT, [1, 0.0668740347, 0.00879428629, 0.00162175996, 3.61404673e-5, 8.76441277e-7]),
    ],
    ids=["K2.5 and K2.6", "Thinking", "Instruct"],
)
def test_inverse_frequencies(config, want):
    np.testing.assert_allclose(inv_freq(config)[[0, 8, 14, 19, 20, 31]], want, rtol=2e-7)


def test_without_yarn():
    plain = ModelConfig.from_dict(K2)
    np.testing.assert_allclose(inv_freq(plain), [50000 ** (-2 * i / 64) for i in range(32)], rtol=1e-14)
    assert attention_factor(plain.yarn) == 1
    assert softmax_scale(plain) == 192**-0.5


def test_softmax_scale():
    assert softmax_scale(KIMI_K2_6) == pytest.approx(0.144679626, abs=5e-10)
    assert softmax_scale(KIMI_K2_INSTRUCT) == pytest.approx(0.130860800, abs=5e-10)


@pytest.mark.parametrize(
    ("yarn", "want"),
    [
        ({}, 1.0),  # equal mscales, as in every Kimi release
        ({"mscale": 0.5}, (0.05 * math.log(64) + 1) / (0.1 * math.log(64) + 1)),
        ({"mscale": None, "mscale_all_dim": None}, 0.1 * math.log(64) + 1),
        ({"attention_factor": 1.25}, 1.25),
    ],
)
def test_attention_factor(yarn, want):
    config = k2(64.0, 32.0, **yarn)
    assert attention_factor(config.yarn) == pytest.approx(want, rel=1e-12)
    cos, sin = rope_tables(config, 7)
    assert cos.shape == sin.shape == (7, 32)
    np.testing.assert_allclose(cos**2 + sin**2, want**2, rtol=1e-12)
    assert sin[5, 8] == pytest.approx(want * math.sin(5 * inv_freq(config)[8]))
