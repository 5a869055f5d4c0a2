"""Bundles out to Hugging Face folders, and folders in as bundles: bundle -> folder -> bundle gives the same bytes."""

import json
import math
from pathlib import Path

import numpy as np

from engine.bundle import OpenBundle
from engine.checkpoint import SUFFIXES, Checkpoint
from engine.generated import GeneratedModel
from engine.mapped import NUMPY
from engine.native import HostTensor
from reference.bundle import Bundle, write_safetensors

SHARD_BYTES = 5 * 10**9
DTYPES = {"F32": "float32", "BF16": "bfloat16"}

# What transformers needs to hear beside the bundle's own fields.
FIXED_FIELDS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "hidden_act": "silu",
    "num_nextn_predict_layers": 0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}


class ExportError(ValueError):
    """The folder cannot be written: `<folder>: <field>: <value>: <reason>`."""


def export_bundle(
    bundle: OpenBundle | GeneratedModel, folder: str | Path, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Writes the bundle as a folder that transformers, vLLM and SGLang read: config.json and shards of about
    `shard_bytes`, with an index if there are several. Returns the shards. The folder must be new or empty. Of
    generated weights a shard at a time is in memory.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder}: output: exists: must be a new or an empty folder")
    shards = _shards(bundle.tensors, shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):06}.safetensors" for i in range(1, len(shards) + 1)]
    placed, size = {}, 0
    for file, shard in zip(names, shards, strict=True):
        tensors = {name: array for tensor in shard for name, array in _released(tensor, bundle.tensors[tensor]).items()}
        write_safetensors(folder / file, tensors, {"format": "pt"})
        placed |= dict.fromkeys(tensors, file)
        size += sum(array.nbytes for array in tensors.values())
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": placed})
    _write_json(folder / "config.json", _config(bundle))
    return [folder / name for name in names]


def import_checkpoint(checkpoint: Checkpoint) -> Bundle:
    """The checkpoint as a bundle, tensors in the order of its files. Raises CheckpointError if a value is unsound."""
    tensors = sorted(checkpoint.tensors.items(), key=lambda item: item[1].place)
    quant = {"bits": 4, "group_size": checkpoint.group_size} if checkpoint.group_size else None
    return Bundle(checkpoint.fields, quant, {name: tensor.load() for name, tensor in tensors})


def _shards(tensors: dict[str, HostTensor], shard_bytes: int) -> list[list[str]]:
    """Names in their order; a shard ends where the next tensor would make it too large."""
    shards, size = [[]], 0
    for name, tensor in tensors.items():
        n_bytes = math.prod(tensor.shape) * np.dtype(NUMPY[tensor.dtype]).itemsize
        if shards[-1] and size + n_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += n_bytes
    return shards


def _released(name: str, tensor: HostTensor) -> dict[str, np.ndarray]:
    """A tensor as released: under its name there, codes with their shape beside them."""
    array = tensor.load()
    stem, dot, kind = name.rpartition(".")
    own = {suffix: released for released, suffix in SUFFIXES.items()}
    made = {stem + own.get(dot + kind, dot + kind): array}
    if kind == "qw":
        made[stem + ".weight_shape"] = np.array([array.shape[0], array.shape[1] * 8], np.int32)
    return made


def _config(bundle: OpenBundle | GeneratedModel) -> dict:
    """config.json. `kdtree_fields` lists what comes from the bundle, so that an import takes just that."""
    own = {
        "dtype": DTYPES[bundle.tensors["lm_head.weight"].dtype],
        "kdtree_fields": sorted(bundle.fields),
        "num_key_value_heads": bundle.config.num_attention_heads,
    }
    if bundle.group_size:
        own["quantization_config"] = _quantization(bundle)
    return FIXED_FIELDS | own | bundle.fields


def _quantization(bundle: OpenBundle | GeneratedModel) -> dict:
    """compressed-tensors' description. `ignore` names every linear layer that is not packed."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": bundle.group_size,
               "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
               "observer_kwargs": {}}  # fmt: skip
    packed = {name.removesuffix(".qw") for name in bundle.tensors if name.endswith(".qw")}
    ignore = ["lm_head", "re:.*self_attn.*"]
    for module, pattern in (("shared_experts.gate_proj", "re:.*shared_experts.*"),
                            ("mlp.gate_proj", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")):  # fmt: skip
        if not any(name.endswith(module) for name in packed):
            ignore.append(pattern)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None,
                        "output_activations": None}
        },
        "ignore": ignore,
    }  # fmt: skip


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
