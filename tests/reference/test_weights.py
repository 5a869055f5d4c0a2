import hashlib
import json
import math
import sys

import numpy as np
import pytest

from reference import weights
from reference.bundle import Bundle, bf16_to_f32, round_to_bf16
from reference.config import ModelConfig
from reference.model import Model, chain
from reference.tensors import tensor_shapes
from reference.weights import generate, generate_bundle, normal


def test_normal_in_plain_integers():
    """The stream is PCG64's raw output, keyed by seed and name; each value is one correctly rounded product."""
    key = int.from_bytes(hashlib.sha256(b"3:some.weight").digest()[:16], "little")
    raw = [int(x) for x in np.random.PCG64(key).random_raw(6)]
    want = [np.float32(sum((x >> s) & 0xFFFF for s in (0, 16, 32, 48)) - 2 * 0xFFFF) for x in raw]
    got = normal(3, "some.weight", (2, 3))
    assert got.dtype == np.float32 and got.ravel().tolist() == [x * np.float32(math.sqrt(3) / 65536) for x in want]


def test_normal_is_bell_shaped():
    x = normal(1, "x", (100_000,)).astype(np.float64)
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.01 and 3 < np.abs(x).max() < 3.5
    assert abs((np.abs(x) < 1).mean() - 0.68) < 0.02
    assert abs(np.corrcoef(x, normal(1, "y", x.shape))[0, 1]) < 0.02
    assert abs(np.corrcoef(x, normal(2, "x", x.shape))[0, 1]) < 0.02


def test_same_bytes_on_every_machine(small_model, tmp_path):
    """Pinned: another value here means other weights, hence other goldens, for everybody."""
    digests = []
    for dtype in ("float32", "bfloat16"):
        generate_bundle(small_model, dtype).write(tmp_path / dtype)
        digests.append(hashlib.sha256((tmp_path / dtype).read_bytes()).hexdigest()[:16])
    assert digests == ["37778f14e61b14a9", "fa70b283b2b8d21d"]


def test_names_and_shapes(small_model):
    bundle = generate_bundle(small_model, "float32")
    assert {name: x.shape for name, x in bundle.tensors.items()} == tensor_shapes(bundle.config)
    assert bundle.quant is None and "seed" not in bundle.fields
    a, m = "model.layers.1.self_attn.", "model.layers.2.mlp."
    shapes = tensor_shapes(bundle.config)
    assert shapes[a + "q_b_proj.weight"] == (2 * (8 + 8), 16)
    assert shapes[a + "kv_a_proj_with_mqa.weight"] == (16 + 8, 32)
    assert shapes[a + "kv_b_proj.weight"] == (2 * (8 + 12), 16)
    assert shapes[a + "o_proj.weight"] == (32, 2 * 12)
    assert shapes[m + "experts.3.down_proj.weight"] == (32, 32)
    assert shapes[m + "shared_experts.gate_proj.weight"] == (32, 32)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (64, 32)
    assert len(shapes) == 3 + 3 * 9 + 3 + 2 * (2 + 5 * 3)
    assert "model.layers.3.input_layernorm.weight" not in shapes


def test_tensors_without_q_lora_and_shared_experts(small_model):
    changes = {"q_lora_rank": None, "n_shared_experts": 0}
    shapes = tensor_shapes(ModelConfig.from_dict(small_model | changes))
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    assert not [name for name in shapes if "q_a" in name or "q_b" in name or "shared" in name]
    assert len(shapes) == 3 + 3 * 7 + 3 + 2 * (2 + 4 * 3)


def test_a_tensor_depends_on_its_name_and_the_seed_only(small_model, small_bundle):
    config, name = small_bundle.config, "model.layers.1.mlp.gate.weight"
    assert np.array_equal(generate(config, small_model["seed"], name, (4, 32)), small_bundle.tensors[name])
    assert not np.array_equal(generate(config, small_model["seed"] + 1, name, (4, 32)), small_bundle.tensors[name])


def test_bfloat16_rounds_all_but_the_bias(small_model, small_bundle):
    for name, x in generate_bundle(small_model, "bfloat16").tensors.items():
        if name.endswith("bias"):
            assert x.dtype == np.float32 and np.array_equal(x, small_bundle.tensors[name])
        else:
            assert x.dtype == np.uint16 and np.array_equal(bf16_to_f32(x), round_to_bf16(small_bundle.tensors[name]))


def test_no_term_is_idle(small_bundle):
    for name, x in small_bundle.tensors.items():
        assert np.isfinite(x).all() and np.unique(x).size > 0.9 * x.size, name
        if name.endswith("norm.weight"):
            assert 0.1 < x.std() < 0.3 and 0.8 < x.mean() < 1.2, name


def test_command_line(small_model, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out" / "x.safetensors"
    arguments = ["weights", "--config", json.dumps(small_model), "--dtype", "float32", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    weights.main()
    bundle = Bundle.read(output)
    parameters = sum(x.size for x in bundle.tensors.values())
    line = (
        f"generated {len(bundle.tensors)} tensors, {parameters} parameters, {output.stat().st_size} bytes (float32)\n"
    )
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("layers", [1, 12])
def test_logits_keep_their_scale_at_any_size(small_model, layers):
    model = Model(generate_bundle(small_model | {"num_hidden_layers": layers, "hidden_size": 48}, "float32"))
    logits = model.forward(np.arange(64), model.empty_kv(64), 0, chain(64))
    assert 0.7 < logits.std() < 1.4
