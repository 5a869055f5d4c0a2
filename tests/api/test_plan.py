"""The plan against the released sizes, and against a folder's own bytes."""

import json

import pytest

from engine.checkpoint import CheckpointError, open_checkpoint
from engine.plan import parse_size, read_plan
from tests.api import k26
from tests.checkpoint import release

MOE_LAYER, DENSE_LAYER, KV_PER_TOKEN = 9_808_554_496, 995_000_320, 70_272
TOTAL = 594_205_904_896


@pytest.fixture
def folder(tmp_path):
    """Nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(k26.CONFIG))
    return tmp_path


def test_k26_sizes(folder):
    plan = read_plan(folder)
    assert plan.total == TOTAL
    assert plan.layer_bytes == [DENSE_LAYER] + [MOE_LAYER] * 60
    assert plan.parts["embedding"] + plan.parts["head"] == 4_697_620_480
    assert plan.parts["routed experts"] == 60 * 9_512_690_688
    assert plan.kv_per_token == KV_PER_TOKEN
    assert round(plan.read_per_token / 1e9, 1) == 33.0


@pytest.mark.parametrize("parallel", ["tp", "ep", "pp"])
@pytest.mark.parametrize("gpus", [1, 5, 8])
def test_shares_make_the_whole(folder, gpus, parallel):
    plan = read_plan(folder, gpus=gpus, memory=10**12, parallel=parallel)
    held = sum(gpu.weights for gpu in plan.gpus)
    assert len(plan.gpus) == gpus
    if parallel == "pp":
        assert held == TOTAL
        assert [layer for gpu in plan.gpus for layer in gpu.layers] == list(range(61))
        assert sum(gpu.kv_per_token for gpu in plan.gpus) == KV_PER_TOKEN
    else:
        assert held >= TOTAL - 100 and all(gpu.kv_per_token == KV_PER_TOKEN for gpu in plan.gpus)
    assert (held > TOTAL + 100) == (gpus > 1 and parallel != "pp")


def test_eight_gpus_of_96_gb(folder):
    """The published arithmetic for tensor parallelism; expert parallelism with all else on every GPU leaves no room."""
    tp = read_plan(folder, gpus=8, memory=parse_size("96GB"), parallel="tp")
    latents, norms, router = 61 * (22_020_096 + 8_257_536), 61 * 32_768 + 14_336, 330_393_600
    whole = latents + norms + router
    assert [gpu.weights for gpu in tp.gpus] == [pytest.approx(whole + (TOTAL - whole) / 8, abs=8)] * 8  # 76.2 GB
    assert round(tp.gpus[0].left / 1e9, 1) == 19.8 and tp.fits
    assert tp.gpus[0].kv_tokens == tp.gpus[0].left // KV_PER_TOKEN
    ep = read_plan(folder, gpus=8, memory=parse_size("96GB"), parallel="ep")
    assert ep.gpus[0].parts["routed experts"] == 60 * 9_512_690_688 // 8
    assert not ep.fits


def test_five_h200_and_not_four(folder):
    memory = parse_size("139GiB")
    assert read_plan(folder, gpus=5, memory=memory).fits
    assert not read_plan(folder, gpus=4, memory=memory).fits


def test_floor(folder):
    """At batch 1 a pipeline's stages wait for each other; tensor parallelism reads side by side."""
    one = read_plan(folder, context=0, bandwidth=4.8e12)
    assert one.floor_seconds == pytest.approx(33.0e9 / 4.8e12, rel=1e-3)
    assert read_plan(folder, gpus=8, context=0, bandwidth=4.8e12).floor_seconds == pytest.approx(one.floor_seconds)
    tp = read_plan(folder, gpus=8, context=0, bandwidth=4.8e12, parallel="tp")
    assert one.floor_seconds / 8 < tp.floor_seconds < one.floor_seconds / 3
    ep = read_plan(folder, gpus=8, context=0, parallel="ep")  # one expert a layer instead of eight, all else whole
    assert ep.gpus[0].read_per_token == pytest.approx(one.gpus[0].read_per_token - 60 * 7 * 24_772_608, rel=1e-6)
    with_kv = read_plan(folder, context=1000, bandwidth=4.8e12)
    assert with_kv.floor_seconds - one.floor_seconds == pytest.approx(KV_PER_TOKEN * 1000 / 4.8e12)


def test_a_folders_own_bytes(tmp_path):
    """What the plan says of the synthetic release is what its shards hold."""
    folder = release.write(tmp_path / "model")
    packed = 3 * 8 * 3  # layers, experts, matrices: each has a weight_shape of 8 bytes
    assert read_plan(folder).total == open_checkpoint(folder).n_bytes + packed * 8


def test_ignore_decides_what_is_int4(folder):
    config = json.loads(json.dumps(k26.CONFIG))
    ignore = config["text_config"]["quantization_config"]["ignore"]
    ignore.remove("re:.*shared_experts.*")
    (folder / "config.json").write_text(json.dumps(config))
    assert TOTAL - read_plan(folder).total == pytest.approx(60 * 88_080_384 * (1 - 4.5 / 16), rel=1e-4)


@pytest.mark.parametrize("pattern", ["re:(a*)*b", "re:(x|x)*" * 9, "re:[", 5, "re:" + "a" * 999, "re:(?i)x{999999999}"])
def test_patterns_that_could_take_for_ever(folder, pattern):
    config = json.loads(json.dumps(k26.CONFIG))
    config["text_config"]["quantization_config"]["ignore"].append(pattern)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantization_config\.ignore"):
        read_plan(folder)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("96GB", 96e9),
        ("90GiB", 90 * 2**30),
        ("4.8TB/s", 4.8e12),
        ("512MB", 512e6),
        ("7B", 7),
        ("1 kB", 1000),
        ("kB", None),
        ("96", None),
    ],
)
def test_sizes(text, n_bytes):
    if n_bytes is not None:
        assert parse_size(text) == n_bytes
        return
    with pytest.raises(ValueError, match="must be a size"):
        parse_size(text)
