"""The stages' own command lines, on what no earlier stage would have made."""

import json

import numpy as np
import pytest

from reference.bundle import write_safetensors
from reference.weights import generate_bundle
from tests.bad_input.conftest import with_config
from tests.fuzz.models import GROUPED

PROMPTS = json.dumps([{"name": "a", "tokens": [1, 2]}])
WEIGHTS = ["reference.weights", "--dtype", "float32"]


def changed(**fields) -> str:
    return json.dumps(GROUPED | fields)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "--config: invalid json_object value: '{'"),
        ("[]", "--config: []: must be a JSON object"),
        ("{}", "vocab_size: missing: needed"),
        (json.dumps({name: value for name, value in GROUPED.items() if name != "seed"}), "seed: None: must be an "),
        (changed(num_attention_heads=10**9), "num_attention_heads: 1000000000: must be at most 1048576"),
        (changed(hidden_size=2**31), "hidden_size: 2147483648: must be at most 1048576"),
        (changed(qk_rope_head_dim=-2), "qk_rope_head_dim: -2: must be positive"),
        (changed(rms_norm_eps="tiny"), "rms_norm_eps: tiny: must be a finite number"),
        (changed(num_experts_per_tok=5), "num_experts_per_tok: 5: exceeds the 2 experts of topk_group groups"),
    ],
)
def test_weights(fails, tmp_path, config, expected):
    assert fails(*WEIGHTS, "--config", config, "--output", tmp_path / "x").startswith(expected)
    assert not list(tmp_path.iterdir())


def test_weights_without_arguments(fails):
    assert fails("reference.weights") == "--config, --dtype, --output: missing: needed"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--group-size", "33"], "group_size: 33: not one of 32, 64, 128"),
        (["--group-size", "64"], "model.layers.0.mlp.gate_proj.weight: 32 inputs: not a multiple of group size 64"),
        (["--group-size", "many"], "--group-size: invalid int value: 'many'"),
    ],
)
def test_quantize(fails, bundle, tmp_path, arguments, expected):
    assert fails("reference.quantize", "--bundle", bundle, "--output", tmp_path / "x", *arguments) == expected
    assert not (tmp_path / "x").exists()


def test_quantize_twice(fails, write, int4_file, tmp_path):
    line = fails("reference.quantize", "--bundle", write(int4_file), "--group-size", "32", "--output", tmp_path / "x")
    assert line.startswith("quant: {'bits': 4, 'group_size': 32}: the bundle is quantised already")


def golden(fails, bundle, tmp_path, prompts=PROMPTS, new_tokens="4"):
    output = tmp_path / "golden"
    line = fails("reference.golden", "--bundle", bundle, "--prompts", prompts, "--max-new-tokens", new_tokens,
                 "--output", output)  # fmt: skip
    assert not output.exists()
    return line


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"tokens": [17]}, "prompts.a.tokens: 17: outside the vocabulary of 17"),
        ({"tokens": [-1]}, "prompts.a.tokens: -1: outside the vocabulary of 17"),
        ({"tokens": []}, "prompts.a.tokens: empty: needs a token"),
        ({"text": "a"}, "prompts.a.text: 'a': bytes are tokens, which needs vocab_size >= 256, not 17"),
        ({"tokens": [1] * 61}, "prompts.a: 61 tokens: with 4 new ones over the context of 64"),
    ],
)
def test_golden_prompt(fails, bundle, tmp_path, prompt, expected):
    assert golden(fails, bundle, tmp_path, json.dumps([{"name": "a", **prompt}])) == expected


def test_golden_bundle(fails, write, float_file, tmp_path):
    data = float_file.bytes()
    cut = write(data[:-1], "cut")
    assert golden(fails, cut, tmp_path).startswith(f"{cut}: Error while deserializing: ")
    missing = tmp_path / "none"
    assert golden(fails, missing, tmp_path) == f"{missing}: No such file or directory: cannot be read or written"
    linear = write(with_config(float_file, rope_scaling={"type": "linear"}), "linear")
    assert golden(fails, linear, tmp_path).startswith("rope_scaling.rope_type: linear: only default and yarn ")
    more = write(with_config(float_file, num_hidden_layers=3), "more")
    assert golden(fails, more, tmp_path).startswith(f"{more}: model.layers.2.input_layernorm.weight: missing: ")
    foreign = tmp_path / "foreign"
    write_safetensors(foreign, {"x": np.zeros(3)}, {"format": "pt"})
    assert golden(fails, foreign, tmp_path) == f"{foreign}: format: pt: not KDTR 1"


@pytest.fixture
def run(fails, library_path, bundle, tmp_path):
    """engine.run with one argument changed."""
    golden = tmp_path / "golden"
    names = ("prompt", "tokens")
    tensors = {f"a.{name}": np.array([1, 2], np.int32) for name in names}
    tensors |= {"a.logits": np.zeros((2, 17), np.float32), "a.noise": np.zeros(1)}
    write_safetensors(golden, tensors, {"names": '["a"]'})

    def call(**changes):
        arguments = {"library": library_path, "bundle": bundle, "golden": golden, "mode": "ar", "block-size": 4,
                     "max-new-tokens": 4, "output": tmp_path / "run"} | changes  # fmt: skip
        line = fails("engine.run", *(part for name, value in arguments.items() for part in (f"--{name}", value)))
        assert not (tmp_path / "run").exists()
        return line

    return call


def test_run(run, bundle, write, tmp_path):
    assert run(bundle=(cut := write(b"cut", "cut"))) == f"{cut}: size: 3: too short for a safetensors file"
    assert run(golden=cut).startswith(f"{cut}: Error while deserializing: ")
    assert run(golden=bundle) == f"{bundle}: names: missing: this is no golden"
    assert run(mode="ddtree") == "--script: missing: the drafter needs the plain run"
    assert run(mode="ddtree", script=bundle) == f"{bundle}: kdtree: missing: this is no run"
    assert run(**{"block-size": 0}) == f"{bundle}: block_size: 0: must lie in 1..1048576"
    assert run(**{"tree-budget": -1}) == f"{bundle}: tree_budget: -1: must lie in 0..1048576"
    assert run(**{"max-new-tokens": 0}) == f"{bundle}: prompt: 2 tokens: the context holds 2"
    assert run(library=cut).startswith(f"library: {cut}: ")


def test_vocabulary_of_another_model(run, write, bundle, tmp_path):
    """A golden whose prompt the bundle cannot read."""
    other = tmp_path / "other"
    tensors = {"a.prompt": np.array([40], np.int32), "a.tokens": np.array([1], np.int32)}
    tensors |= {"a.logits": np.zeros((1, 64), np.float32), "a.noise": np.zeros(1)}
    write_safetensors(other, tensors, {"names": '["a"]'})
    assert run(golden=other) == f"{bundle}: prompt: 40: outside the vocabulary of 17"


def test_generated_weights_are_bytes_of_their_name():
    """What the others rely on: the sound config does generate."""
    assert generate_bundle(GROUPED, "float32").tensors
