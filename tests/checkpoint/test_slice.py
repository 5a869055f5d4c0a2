"""The slice of Kimi-K2.6: its config is the real one, its weights can be made row by row, and its checks can fail."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from engine import slice as slice_module
from engine.generated import generate_model
from reference import ops
from tests.api import k26

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/k26_slice.yaml"
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 512,
    "n_routed_experts": 32,
    "moe_intermediate_size": 64,
}


@pytest.fixture(scope="module")
def config():
    """The slice with everything in it but the size."""
    whole = yaml.safe_load(CONFIG.read_text())
    return whole | {"model": whole["model"] | SMALL}


@pytest.fixture(scope="module")
def model(config):
    return generate_model(config["model"], config["seed"], config["group_size"])


def test_dimensions_are_the_released_ones():
    fields = yaml.safe_load(CONFIG.read_text())["model"]
    differing = {name for name, value in fields.items() if k26.TEXT[name] != value}
    assert differing == {"num_hidden_layers"}


def test_tensors_are_reproducible_and_rows_can_be_made_alone(model):
    for name in (
        "lm_head.weight",
        "model.layers.1.mlp.experts.3.up_proj.qw",
        "model.layers.1.mlp.experts.3.up_proj.sc",
    ):
        tensor = model.tensors[name]
        whole = tensor.load()
        assert whole.shape == tensor.shape and np.array_equal(whole, tensor.load())
        if name != "model.layers.1.mlp.experts.3.up_proj.sc":  # a row of scales is less than eight bytes of randomness
            assert all(np.array_equal(tensor.row(i), whole[i]) for i in (0, 1, len(whole) - 1))
    codes = model.tensors["model.layers.1.mlp.experts.3.up_proj.qw"].load().view(np.uint8)
    assert set((codes & 15).reshape(-1)) == set(range(16)) == set((codes >> 4).reshape(-1))


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_everything_holds(activations, config, model, library_path):
    made = slice_module.run(config, model, library_path, activations)
    assert all(made["holds"].values()), made
    assert ("numpy" in made["holds"]) == (activations == "float32")
    assert 0.5 < made["logit_std"] < 2 and made["avg_accept"] > 1.5


def test_through_the_loader(config, model, library_path, tmp_path):
    made = slice_module.run(config, model, library_path, "float32", tmp_path / "shards")
    assert all(made["holds"].values()), made
    assert (tmp_path / "shards/model.safetensors").exists()


def test_a_wrong_reference_shows(config, model, library_path, monkeypatch):
    route = ops.moe_route

    def wrong(*arguments):
        experts, weights = route(*arguments)
        return np.roll(experts, 1, axis=1), weights

    monkeypatch.setattr(ops, "moe_route", wrong)
    assert not slice_module.run(config, model, library_path, "float32")["holds"]["numpy"]


def test_command_line(config, library_path, tmp_path):
    (tmp_path / "slice.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "engine.slice", "--config", tmp_path / "slice.yaml", "--library", library_path]
    done = subprocess.run([*command, "--layers", "1", "--dense", "0"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and json.loads(done.stdout)["layers"] == 1, done.stderr
    config = config | {"group_size": 48}
    (tmp_path / "slice.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "group_size: 48" in done.stderr
