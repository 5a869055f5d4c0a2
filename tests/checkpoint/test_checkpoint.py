"""Opening a release: everything arrives as its bundle has it, and what is not the text model's is named and skipped."""

import json

import numpy as np
import pytest

from engine.bundle import open_bundle
from engine.checkpoint import open_checkpoint
from engine.export import import_checkpoint
from engine.mapped import MappedFile
from engine.native import Drafter, Engine
from reference.bundle import write_safetensors
from tests.checkpoint import release

PROMPT = [5, 17, 300, 42, 5, 9]


def loaded(checkpoint) -> dict[str, np.ndarray]:
    return {name: tensor.load() for name, tensor in checkpoint.tensors.items()}


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def decode(library_path, model, mode="ar", activations="float32"):
    with Engine(library_path, model, context=64, activations=activations, drafter=Drafter("noisy", 0.3)) as engine:
        script = PROMPT + engine.generate(PROMPT, mode="ar", max_new_tokens=32).tokens
        rounds = []
        result = engine.generate(PROMPT, mode=mode, max_new_tokens=24, script=script, record=True,
                                 on_round=rounds.append)  # fmt: skip
        return result.tokens, np.concatenate([round_.logits for round_ in rounds])


def test_every_tensor_is_the_bundles(pristine, bundle):
    checkpoint = open_checkpoint(pristine)
    assert same(loaded(checkpoint), bundle.tensors)
    assert (checkpoint.group_size, checkpoint.config) == (release.GROUP, bundle.config)
    assert checkpoint.n_bytes == sum(x.nbytes for x in bundle.tensors.values())


def test_what_is_skipped_is_named(pristine):
    assert open_checkpoint(pristine).skipped == {
        "vision_tower": 2, "mm_projector": 1, "rotary_emb.inv_freq": 4, "model.layers.4 (MTP)": 1,
    }  # fmt: skip


def test_layers_straddle_shards(pristine):
    """What the other tests rely on."""
    placed = json.loads((pristine / "model.safetensors.index.json").read_text())["weight_map"]
    files = [{file for name, file in placed.items() if f".layers.{layer}." in name} for layer in range(4)]
    assert all(len(shards) > 1 for shards in files[1:])
    assert len(set(placed.values())) == 12


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_decodes_as_its_bundle(mode, activations, pristine, bundle, tmp_path, library_path):
    bundle.write(tmp_path / "b.safetensors")
    tokens, logits = decode(library_path, open_bundle(tmp_path / "b.safetensors"), mode, activations)
    made = decode(library_path, open_checkpoint(pristine), mode, activations)
    assert made[0] == tokens and len(set(tokens)) > 8
    assert made[1].tobytes() == logits.tobytes()


@pytest.mark.parametrize("layers", [range(0, 2), range(1, 4), range(3, 4)])
def test_some_layers_alone(layers, pristine, tmp_path, library_path):
    part = release.make_bundle(layers)
    checkpoint = open_checkpoint(pristine, layers)
    assert same(loaded(checkpoint), part.tensors)
    part.write(tmp_path / "b.safetensors")
    assert decode(library_path, checkpoint)[0] == decode(library_path, open_bundle(tmp_path / "b.safetensors"))[0]


def test_only_what_is_asked_for_is_read(pristine, monkeypatch, library_path):
    read = set()

    def spied(method):
        def spy(file, entry):
            read.add(next(name for name, other in file.entries.items() if other is entry))
            return method(file, entry)

        return spy

    for name in ("array", "fetch"):
        monkeypatch.setattr(MappedFile, name, spied(getattr(MappedFile, name)))
    checkpoint = open_checkpoint(pristine, range(2, 3))
    assert not read
    decode(library_path, checkpoint)
    assert {name.split(".layers.")[1].split(".")[0] for name in read if ".layers." in name} == {"2"}
    assert release.PREFIX + "lm_head.weight" in read and not any("vision" in name for name in read)


def test_int64_shapes(tmp_path, bundle):
    folder = release.write(tmp_path / "model", bundle, shape_dtype=np.int64)
    assert same(loaded(open_checkpoint(folder)), bundle.tensors)


def edit_config(folder, edit):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(edit(config)))


def spelt_by_transformers_5(config):
    text = config["text_config"]
    rope = text.pop("rope_scaling")
    rope["rope_type"] = rope.pop("type")
    text["rope_parameters"] = rope | {"rope_theta": text.pop("rope_theta")}
    text |= {"model_type": "deepseek_v3", "head_dim": 16, "qk_head_dim": 48}
    return config


def fields_at_the_top(config):
    return config["text_config"]


def quantization_at_the_top(config):
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    return config


@pytest.mark.parametrize("edit", [spelt_by_transformers_5, fields_at_the_top, quantization_at_the_top])
def test_config_spellings(edit, folder, bundle):
    edit_config(folder, edit)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == bundle.config
    assert same(loaded(checkpoint), bundle.tensors)


def test_one_file_without_an_index(tmp_path, bundle):
    folder = release.write(tmp_path / "model", bundle)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    write_safetensors(folder / "model.safetensors", release.tensors(bundle), {"format": "pt"})
    assert same(loaded(open_checkpoint(folder)), bundle.tensors)


def test_imports_as_a_bundle_that_opens(pristine, bundle, tmp_path):
    made = import_checkpoint(open_checkpoint(pristine))
    made.write(tmp_path / "b.safetensors")
    opened = open_bundle(tmp_path / "b.safetensors")
    assert same({name: tensor.array for name, tensor in opened.tensors.items()}, bundle.tensors)
    assert opened.config == bundle.config
