"""The numpy model against transformers on the same weights, and faults that this comparison must show."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from reference import model as model_module
from reference import ops, rope
from reference.bundle import Bundle, as_float, write_safetensors
from reference.config import ModelConfig
from reference.decode import decode_ar
from reference.model import Model, chain
from reference.quantize import quantize_bundle
from reference.weights import generate_bundle

transformers = pytest.importorskip("transformers", reason="the transformers oracle is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.oracle

MODELS = yaml.safe_load((Path(__file__).parents[2] / "config.yaml").read_text())["models"]
TOLERANCE = 2e-5
POSITIONS = 300  # past the original context of the generated models, 256
NEW_TOKENS = 64

VARIANTS = {
    "as configured": {},
    "two groups, one kept": {"n_group": 2, "topk_group": 1},
    "no q_lora": {"q_lora_rank": None},
    "no YaRN": {"rope_scaling": None},
    "beta_fast 1": {"rope_scaling": {"beta_fast": 1.0}},
    "unequal mscales": {"rope_scaling": {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "two shared experts": {"n_shared_experts": 2},
    "weights not normalised": {"norm_topk_prob": False},
}


def variant(name: str, changes: dict) -> dict:
    model = MODELS[name] | changes
    if changes.get("rope_scaling"):
        model["rope_scaling"] = MODELS[name]["rope_scaling"] | changes["rope_scaling"]
    return model


def prompt(bundle: Bundle, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, bundle.config.vocab_size, length)


def numpy_logits(bundle: Bundle, tokens: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    model = Model(bundle, dtype)
    return model.forward(tokens, model.empty_kv(len(tokens)), 0, chain(len(tokens)))


def float_twin(bundle: Bundle) -> Bundle:
    """An INT4 bundle with its matrices dequantised to float32 (exact), any other as it is.

    transformers runs packed INT4 in bf16, so it can only judge this twin.
    """
    tensors = dict(bundle.tensors)
    for name in [name for name in tensors if name.endswith(".qw")]:
        stem = name.removesuffix(".qw")
        qw, sc = tensors.pop(name), as_float(tensors.pop(stem + ".sc"))
        tensors[stem + ".weight"] = ops.dequantize(qw, sc, bundle.quant["group_size"])
    return Bundle(bundle.fields, None, tensors)


def load_oracle(bundle: Bundle, folder: Path):
    """Saves the bundle as a checkpoint that transformers itself reads, names and all."""
    fields = {**bundle.fields, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
              "num_key_value_heads": bundle.config.num_attention_heads, "num_nextn_predict_layers": 0}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    write_safetensors(folder / "model.safetensors", float_twin(bundle).tensors, {"format": "pt"})
    model, info = transformers.DeepseekV3ForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def oracle_logits(model, tokens: np.ndarray) -> np.ndarray:
    """[len(tokens), vocab], float32."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None].long()).logits[0].numpy()


def oracle_greedy(model, prompt: np.ndarray, new_tokens: int) -> list[int]:
    ids = torch.from_numpy(prompt)[None].long()
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                             do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


def test_defaults_are_those_of_transformers():
    theirs = transformers.DeepseekV3Config()
    for field in dataclasses.fields(ModelConfig):
        if field.default is not dataclasses.MISSING and hasattr(theirs, field.name):
            assert getattr(theirs, field.name) == field.default, field.name


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(name, changes, tmp_path):
    bundle = generate_bundle(variant(name, changes), "float32")
    oracle, tokens = load_oracle(bundle, tmp_path), prompt(bundle, POSITIONS)
    want = oracle_logits(oracle, tokens)
    for dtype in (np.float64, np.float32):
        assert np.abs(numpy_logits(bundle, tokens, dtype) - want).max() < TOLERANCE
    start = prompt(bundle, 20)
    assert decode_ar(Model(bundle), start.tolist(), NEW_TOKENS).tokens == oracle_greedy(oracle, start, NEW_TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_int4(name, dtype, tmp_path):
    bundle = quantize_bundle(generate_bundle(MODELS[name], dtype), 32)
    oracle, tokens = load_oracle(bundle, tmp_path), prompt(bundle, POSITIONS)
    assert np.abs(numpy_logits(bundle, tokens) - oracle_logits(oracle, tokens)).max() < TOLERANCE
    start = prompt(bundle, 20)
    assert decode_ar(Model(bundle), start.tolist(), NEW_TOKENS).tokens == oracle_greedy(oracle, start, NEW_TOKENS)


# ---- faults: each is the reference with one thing wrong -----------------------------------------------------------


def rope_half_split(patch, bundle):
    right = ops.rope

    def wrong(x, positions, cos, sin):
        half = x.shape[-1] // 2
        return right(np.stack((x[..., :half], x[..., half:]), -1).reshape(x.shape), positions, cos, sin)

    patch.setattr(ops, "rope", wrong)


def softmax_scale_without_mscale(patch, bundle):
    patch.setattr(rope, "softmax_scale", lambda config: config.qk_head_dim**-0.5)


def softmax_scale_with_mscale_once(patch, bundle):
    m = rope.mscale(bundle.config.yarn.factor, 1.0)
    patch.setattr(rope, "softmax_scale", lambda config: config.qk_head_dim**-0.5 * m)


def mscale_on_cos_and_sin(patch, bundle):
    patch.setattr(rope, "attention_factor", lambda yarn: rope.mscale(yarn.factor, 1.0))


def no_yarn(patch, bundle):
    right = rope.inv_freq
    patch.setattr(rope, "inv_freq", lambda config: right(dataclasses.replace(config, yarn=None)))


def beta_fast_1(patch, bundle):
    right = rope.correction_range
    patch.setattr(rope, "correction_range", lambda d, t, yarn: right(d, t, dataclasses.replace(yarn, beta_fast=1.0)))


def ramp_ends_not_rounded(patch, bundle):
    patch.setattr(rope.math, "floor", lambda x: x)


def no_router_bias(patch, bundle):
    right = ops.moe_route
    patch.setattr(ops, "moe_route", lambda logits, bias, *rest: right(logits, 0 * bias, *rest))


def router_bias_in_the_weights(patch, bundle):
    def wrong(logits, bias, top_k, n_group, topk_group, norm_topk_prob, scaling):
        scores = 1 / (1 + np.exp(-logits)) + bias
        experts = np.argsort(-scores, axis=-1, kind="stable")[:, :top_k]
        weights = np.take_along_axis(scores, experts, axis=-1)
        return experts, weights / weights.sum(axis=-1, keepdims=True) * scaling

    patch.setattr(ops, "moe_route", wrong)


def no_scaling_factor(patch, bundle):
    right = ops.moe_route
    patch.setattr(ops, "moe_route", lambda *args: right(*args[:-1], 1.0))


def no_shared_expert(patch, bundle):
    right = ops.moe_experts
    patch.setattr(ops, "moe_experts", lambda *args: right(*args[:-2], None, args[-1]))


def shared_expert_scaled(patch, bundle):
    right, scaling = ops.moe_experts, bundle.config.routed_scaling_factor
    patch.setattr(ops, "moe_experts", lambda *args: right(*args[:-2], args[-2] * scaling, args[-1]))


def kv_b_all_keys_then_all_values(patch, bundle):
    def wrong(self, p):
        c = self.config
        keys, values = np.split(self.weights[p + "kv_b_proj.weight"], [c.num_attention_heads * c.qk_nope_head_dim])
        return tuple(w.reshape(c.num_attention_heads, -1, c.kv_lora_rank) for w in (keys, values))

    patch.setattr(Model, "kv_b", wrong)


def lora_norms_with_rms_norm_eps(patch, bundle):
    patch.setattr(model_module, "LORA_NORM_EPS", bundle.config.rms_norm_eps)


def norms_with_lora_norm_eps(patch, bundle):
    patch.setattr(Model, "norm", Model.lora_norm)


FAULTS = [
    rope_half_split,
    softmax_scale_without_mscale,
    softmax_scale_with_mscale_once,
    mscale_on_cos_and_sin,
    no_yarn,
    beta_fast_1,
    ramp_ends_not_rounded,
    no_router_bias,
    router_bias_in_the_weights,
    no_scaling_factor,
    no_shared_expert,
    shared_expert_scaled,
    kv_b_all_keys_then_all_values,
    lora_norms_with_rms_norm_eps,
    norms_with_lora_norm_eps,
]


@pytest.fixture(scope="module", params=MODELS)
def judged(request, tmp_path_factory):
    """A bundle, tokens and the oracle's logits; the sound reference agrees."""
    bundle = generate_bundle(MODELS[request.param], "float32")
    tokens = prompt(bundle, POSITIONS)
    want = oracle_logits(load_oracle(bundle, tmp_path_factory.mktemp("model")), tokens)
    assert np.abs(numpy_logits(bundle, tokens) - want).max() < TOLERANCE
    return bundle, tokens, want


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_seen(judged, fault, monkeypatch):
    bundle, tokens, want = judged
    fault(monkeypatch, bundle)
    error = np.abs(numpy_logits(bundle, tokens) - want).max()
    print(f"{fault.__name__}: max error {error:.1e}")
    assert error > 2 * TOLERANCE
