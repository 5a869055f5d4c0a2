"""config.yaml: defaults, overlays, and one line for each thing that is wrong."""

import copy
import json

import pytest
import yaml
from driver import ROOT

from engine.config import check

SCHEMA = ROOT / "config.schema.yaml"


def merged(base: dict, overlay: dict) -> dict:
    """As snakemake lays one config file over another: maps are merged, all else is replaced."""
    result = copy.deepcopy(base)
    for key, value in overlay.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def errors(tmp_path, overlay: dict, no_cuda: str | None = None) -> list[str]:
    """Those of config.yaml under `overlay`."""
    file = tmp_path / "overlay.yaml"
    file.write_text(yaml.safe_dump(overlay))
    base = yaml.safe_load((ROOT / "config.yaml").read_text())
    found = check(merged(base, overlay), SCHEMA, ["config.yaml", file], no_cuda)
    return [line.replace(str(file), "overlay.yaml") for line in found]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_own_config_is_right(tmp_path):
    assert errors(tmp_path, {}) == []


def test_defaults_are_filled():
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    del config["verify"], config["device"], config["decode"]["drafter"], config["decode"]["stop_token_ids"]
    config["bundles"]["plain"] = {"model": "tiny"}
    assert check(config, SCHEMA, ["config.yaml"]) == []
    assert config["verify"] == {
        "logit_floor": 1e-5,
        "noise_factor": 2.0,
        "bf16_factor": 2.0,
        "drafters": ["noisy", "adversarial"],
    }
    assert config["device"] == "auto" and config["decode"]["stop_token_ids"] == []
    assert config["decode"]["drafter"] == {"kind": "oracle", "p": 0.3, "seed": 1}
    assert config["bundles"]["plain"] == {"model": "tiny", "dtype": "float32", "quant": None}


def test_a_gpu_that_is_asked_for_and_not_there(tmp_path):
    assert errors(tmp_path, {"device": "cuda"}) == []
    assert errors(tmp_path, {"device": "auto"}, no_cuda="no nvcc") == []
    assert errors(tmp_path, {"device": "cuda"}, no_cuda="no nvcc") == ['error: overlay.yaml: device: "cuda": no nvcc']


def test_bundles_may_be_left_out():
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    del config["bundles"]
    assert check(config, SCHEMA, ["config.yaml"]) == [] and config["bundles"] == {}


WRONG = {
    "unknown key": (
        {"decode": {"tree_buget": 3}},
        "overlay.yaml: decode.tree_buget: 3: unknown key; known: prompts, max_new_tokens",
    ),
    "unknown key at the top": ({"models_": {}}, "overlay.yaml: models_: {}: unknown key; known: models, "),
    "unknown field of a model": ({"models": {"tiny": {"n_head": 4}}}, "models.tiny.n_head: 4: unknown key"),
    "missing field": (
        {"models": {"new": {"seed": 1}}},
        "overlay.yaml: models.new.vocab_size: null: missing",
    ),
    "wrong type": ({"decode": {"block_size": "8"}}, "decode.block_size: \"8\": is not of type 'integer'"),
    "block size 0": ({"decode": {"block_size": 0}}, "decode.block_size: 0: is less than the minimum of 1"),
    "negative budget": ({"decode": {"tree_budget": -1}}, "decode.tree_budget: -1: is less than the minimum of 0"),
    "drafter": ({"decode": {"drafter": {"kind": "eagle"}}}, 'decode.drafter.kind: "eagle": is not one of'),
    "probability": ({"decode": {"drafter": {"p": 1.5}}}, "decode.drafter.p: 1.5: is greater than the maximum of 1"),
    "device": ({"device": "tpu"}, 'overlay.yaml: device: "tpu": is not one of'),
    "bits": ({"bundles": {"int4_tiny": {"quant": {"bits": 3}}}}, "bundles.int4_tiny.quant.bits: 3: 4 was expected"),
    "bundle's model": ({"bundles": {"x": {"model": "huge"}}}, 'bundles.x.model: "huge": no such model; known: tiny'),
    "bundle named as a model": ({"bundles": {"tiny": {"model": "tiny"}}}, "bundles.tiny: "),
    "bundle's name": ({"bundles": {"a/b": {"model": "tiny"}}}, "a/b"),
    "group size": (
        {"bundles": {"int4_tiny2": {"quant": {"group_size": 128}}}},
        "bundles.int4_tiny2.quant.group_size: 128: does not divide hidden_size = 192 of model tiny2",
    ),
    "no float bundle to quantise": (
        {"bundles": {"x": {"model": "tiny", "dtype": "bfloat16", "quant": {"bits": 4, "group_size": 32}}}},
        'bundles.x.dtype: "bfloat16": needs a bfloat16 bundle of model tiny without quant',
    ),
    "experts": ({"models": {"tiny": {"num_experts_per_tok": 9}}}, "models.tiny.num_experts_per_tok: 9: "),
    "groups": ({"models": {"tiny": {"n_group": 3}}}, "models.tiny.n_group: 3: must divide n_routed_experts"),
    "odd rope": ({"models": {"tiny": {"qk_rope_head_dim": 15}}}, "models.tiny.qk_rope_head_dim: 15: "),
    "rope type": (
        {"models": {"tiny": {"rope_scaling": {"type": "linear"}}}},
        'overlay.yaml: models.tiny.rope_scaling.type: "linear": ',
    ),
    "text for a small vocabulary": (
        {"models": {"tiny": {"vocab_size": 200}}},
        'config.yaml: decode.prompts[0].text: "T": text needs 256 tokens, model tiny has 200',
    ),
    "token outside the vocabulary": (
        {"decode": {"prompts": [{"name": "a", "tokens": [1, 400]}]}},
        "overlay.yaml: decode.prompts[0].tokens: 400: token outside the vocabulary of model tiny2, 400",
    ),
    "stop token": ({"decode": {"stop_token_ids": [5, 511]}}, "decode.stop_token_ids: 511: token outside the"),
    "empty prompt": ({"decode": {"prompts": [{"name": "a", "text": ""}]}}, 'decode.prompts[0].text: "": '),
    "no prompts": ({"decode": {"prompts": []}}, "decode.prompts: []: "),
    "text and tokens": (
        {"decode": {"prompts": [{"name": "a", "text": "b", "tokens": [1]}]}},
        "decode.prompts[0]: ",
    ),
    "same name": (
        {"decode": {"prompts": [{"name": "a", "text": "b"}, {"name": "a", "text": "c"}]}},
        'decode.prompts[1].name: "a": an earlier prompt has this name',
    ),
    "context": (
        {"models": {"tiny": {"max_position_embeddings": 60}}},
        'decode.prompts[2].text: "43 tokens": and 24 new ones exceed the context of model tiny, 60',
    ),
}


@pytest.mark.parametrize(("overlay", "expected"), WRONG.values(), ids=WRONG)
def test_wrong(tmp_path, overlay, expected):
    found = errors(tmp_path, overlay)
    assert any(expected in line for line in found), found
    assert all(line.startswith("error: ") and "\n" not in line for line in found)


def test_every_error_is_told(tmp_path):
    assert len(errors(tmp_path, {"decode": {"block_size": 0, "tree_budget": -1}, "device": "tpu"})) == 3


def test_through_snakemake(ladder):
    """Status not 0, the line on stderr, nothing run."""
    failed = ladder.snakemake(*ladder.overlay({"decode": {"block_size": 0}}), "results/tiny.pass")
    assert failed.returncode != 0
    assert "error: overlay.yaml: decode.block_size: 0: is less than the minimum of 1" in failed.stderr.splitlines()
    assert "Traceback" not in failed.stderr


def test_overlay_adds_a_model(ladder):
    """A model that the code has never heard of climbs the ladder, INT4 too."""
    config = yaml.safe_load(ladder.read("config.yaml"))
    small = config["models"]["tiny"] | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3, "seed": 5}
    overlay = {
        "models": {"other": small},
        "bundles": {"other_int4": {"model": "other", "quant": {"bits": 4, "group_size": 64}}},
        "decode": {"max_new_tokens": 4, "prompts": [{"name": "ids", "tokens": [0, 7, 0]}]},
    }
    ladder.run(*ladder.overlay(overlay), "results/other_int4.pass")
    verdict = json.loads(ladder.read("results/other_int4.pass"))
    assert verdict["bundle"] == "other_int4" and verdict["backends"]["cpu"]["ar"]["exact"] == 4
