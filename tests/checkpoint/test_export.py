"""Bundles out to a folder that transformers reads, and back with the same bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from engine.bundle import open_bundle
from engine.checkpoint import open_checkpoint
from engine.export import ExportError, export_bundle, import_checkpoint
from engine.native import Engine
from reference.bundle import Bundle
from reference.model import Model, chain
from reference.quantize import quantize_bundle
from reference.weights import generate_bundle
from tests.checkpoint import release

MODELS = yaml.safe_load((Path(__file__).parents[2] / "config.yaml").read_text())["models"]
SMALL_SHARDS = 150_000


def bundles() -> dict[str, Bundle]:
    """A float bundle, a quantised one and one of each kind of dtype; the release's, INT4 in part."""
    model = next(iter(MODELS.values()))
    made = {dtype: generate_bundle(model, dtype) for dtype in ("float32", "bfloat16")}
    made |= {f"int4 {dtype}": quantize_bundle(bundle, 32) for dtype, bundle in list(made.items())}
    made["int4 in groups of 64"] = quantize_bundle(made["float32"], 64)
    made["int4 experts only"] = release.make_bundle()
    return made


BUNDLES = bundles()


@pytest.fixture(params=BUNDLES, ids=lambda name: name.replace(" ", "_"))
def bundle_file(request, tmp_path) -> Path:
    BUNDLES[request.param].write(tmp_path / "bundle.safetensors")
    return tmp_path / "bundle.safetensors"


@pytest.mark.parametrize("shard_bytes", [SMALL_SHARDS, 10**9])
def test_round_trip_is_byte_identical(bundle_file, shard_bytes, tmp_path):
    bundle = open_bundle(bundle_file)
    shards = export_bundle(bundle, tmp_path / "folder", shard_bytes)
    assert (len(shards) > 2) == (shard_bytes == SMALL_SHARDS)
    import_checkpoint(open_checkpoint(tmp_path / "folder")).write(tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == bundle_file.read_bytes()


def test_shards_keep_their_size_and_are_indexed(tmp_path):
    BUNDLES["float32"].write(tmp_path / "b.safetensors")
    bundle = open_bundle(tmp_path / "b.safetensors")
    shards = export_bundle(bundle, tmp_path / "folder", SMALL_SHARDS)
    largest = max(tensor.array.nbytes for tensor in bundle.tensors.values())
    assert all(path.stat().st_size < max(SMALL_SHARDS, largest) + 20_000 for path in shards)
    index = json.loads((tmp_path / "folder/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == bundle.tensors.keys()
    assert index["metadata"]["total_size"] == bundle.n_bytes


def test_a_folder_in_use_is_left_alone(tmp_path):
    BUNDLES["float32"].write(tmp_path / "b.safetensors")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="exists: must be a new or an empty folder"):
        export_bundle(open_bundle(tmp_path / "b.safetensors"), tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["notes.txt"]


def exported(name, folder: Path) -> Path:
    BUNDLES[name].write(folder / "b.safetensors")
    export_bundle(open_bundle(folder / "b.safetensors"), folder / "folder", SMALL_SHARDS)
    return folder / "folder"


@pytest.fixture
def one_thread():
    """torch's threads get in each other's way on models this small."""
    torch = pytest.importorskip("torch", reason="the oracle is not installed")
    torch.set_num_threads(1)


def from_pretrained(folder, dtype):
    transformers = pytest.importorskip("transformers", reason="the transformers oracle is not installed")
    pytest.importorskip("compressed_tensors", reason="the compressed-tensors oracle is not installed")
    model, info = transformers.DeepseekV3ForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def greedy(model, prompt: list[int], new_tokens: int) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                         eos_token_id=None, pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["float32", "int4 float32"])
def test_transformers_generates_the_same_tokens(name, tmp_path, library_path, one_thread):
    """The folder as transformers loads it against the engine on the same folder. In float32 transformers is exact even
    on packed weights: it dequantises them in the type of the scales."""
    folder = exported(name, tmp_path)
    prompt = list(b"The quick brown fox jumps over the dog.")
    with Engine(library_path, open_checkpoint(folder), context=128) as engine:
        tokens = engine.generate(prompt, mode="ar", max_new_tokens=32).tokens
    assert tokens == greedy(from_pretrained(folder, "float32"), prompt, 32)


def test_transformers_reads_the_release(tmp_path, library_path, one_thread):
    """The twelve shards as Kimi-K2.5's own class loads them, all floats and scales F32 so that it is exact."""
    transformers = pytest.importorskip("transformers", reason="the transformers oracle is not installed")
    pytest.importorskip("compressed_tensors", reason="the compressed-tensors oracle is not installed")
    bundle = release.make_bundle(dtype="float32")
    folder = release.write(tmp_path / "model", bundle)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64,
                               "num_attention_heads": 2}  # fmt: skip
    config["text_config"]["quantization_config"]["ignore"] += ["re:.*vision_tower.*", "re:.*mm_projector.*"]
    (folder / "config.json").write_text(json.dumps(config))
    model, info = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(
        folder, dtype="float32", attn_implementation="eager", output_loading_info=True, ignore_mismatched_sizes=True
    )
    assert not [name for name in info["missing_keys"] if "language_model" in name]
    prompt = [5, 17, 300, 42, 5, 9]
    with Engine(library_path, open_checkpoint(folder), context=64) as engine:
        tokens = engine.generate(prompt, mode="ar", max_new_tokens=24).tokens
    assert tokens == greedy(model.eval(), prompt, 24)


def test_transformers_reads_bf16_scales(tmp_path, one_thread):
    """With bf16 scales it runs in bf16, so it is near the reference, not equal; wrong nibbles or scales are far off."""
    import torch

    bundle = BUNDLES["int4 experts only"]
    model = from_pretrained(exported("int4 experts only", tmp_path), "bfloat16")
    tokens = np.random.default_rng(3).integers(0, bundle.config.vocab_size, 72)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)[None]).logits[0].float().numpy()
    ours = Model(bundle, np.float64)
    ours = ours.forward(tokens, ours.empty_kv(len(tokens)), 0, chain(len(tokens)))
    assert np.median(np.abs(theirs - ours).max(axis=-1)) < 0.06 * ours.std()
