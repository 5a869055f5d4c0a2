"""Small models to mutate: every branch of the architecture in a few kilobytes."""

import json
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.bundle import open_bundle
from engine.export import export_bundle
from reference.bundle import FORMAT, NAMES, Bundle
from reference.config import ModelConfig
from reference.quantize import quantize_bundle
from reference.tensors import tensor_shapes
from reference.weights import generate_bundle

YARN = {"type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16}  # fmt: skip
GROUPED = {
    "seed": 1, "vocab_size": 17, "hidden_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_attention_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "intermediate_size": 32, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": YARN,
    "max_position_embeddings": 64,
}  # fmt: skip
PLAIN = GROUPED | {
    "q_lora_rank": None, "n_shared_experts": 0, "n_group": 1, "rope_scaling": None, "num_hidden_layers": 1,
    "first_k_dense_replace": 0, "vocab_size": 31, "num_attention_heads": 1, "n_routed_experts": 3,
}  # fmt: skip


@dataclass
class File:
    """A safetensors file before it is laid out, so that any part of it can be set to anything."""

    metadata: dict
    entries: dict[str, dict]  # dtype, shape, data_offsets
    data: bytes
    trailer: bytes = b""
    header_padding: int = 0  # spaces past a multiple of 8
    extra_header: list[str] = field(default_factory=list)  # further members of the header's JSON, as text

    def copy(self) -> "File":
        entries = {name: dict(entry) for name, entry in self.entries.items()}
        return File(dict(self.metadata), entries, self.data, self.trailer, self.header_padding, list(self.extra_header))

    def bytes(self) -> bytes:
        text = json.dumps({"__metadata__": self.metadata} | self.entries)
        text = "".join([text[:-1], *(f", {member}" for member in self.extra_header), "}"]).encode()
        text += b" " * (-len(text) % 8 + self.header_padding)
        return len(text).to_bytes(8, "little") + text + self.data + self.trailer


def as_file(bundle: Bundle) -> File:
    entries, parts, at = {}, [], 0
    for name, x in bundle.tensors.items():
        entries[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        parts.append(x.tobytes())
        at += x.nbytes
    metadata = {"format": FORMAT, "config": json.dumps(bundle.fields), "quant": json.dumps(bundle.quant)}
    return File(metadata, entries, b"".join(parts))


def parse_file(data: bytes) -> File:
    """A sound safetensors file."""
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:begin])
    return File(entries.pop("__metadata__"), entries, data[begin:])


def bases() -> list[File]:
    """Float and INT4 of both models, with float32 and with bf16 floats."""
    floats = [generate_bundle(model, dtype) for model in (GROUPED, PLAIN) for dtype in ("float32", "bfloat16")]
    return [as_file(bundle) for made in floats for bundle in (made, quantize_bundle(made, 32))]


def folders() -> list[dict[str, bytes]]:
    """The same models as released: the files of a folder by name, some in shards."""
    made = []
    for i, file in enumerate(bases()):
        with tempfile.TemporaryDirectory() as work:
            Path(work, "bundle").write_bytes(file.bytes())
            export_bundle(open_bundle(Path(work, "bundle")), Path(work, "folder"), 20_000 if i % 2 else 1 << 30)
            made.append({file.name: file.read_bytes() for file in sorted(Path(work, "folder").iterdir())})
    return made


def any_model(rng: random.Random) -> File:
    """A sound bundle of a random shape, with odd sizes wherever a size may be odd."""
    n_group = rng.choice([1, 1, 2, 3])
    experts = n_group * rng.randint(1 if n_group == 1 else 2, 3)
    topk_group = rng.randint(1, n_group)
    quantised = rng.random() < 0.5
    width = (lambda most: 32 * rng.randint(1, 2)) if quantised else (lambda most: rng.randint(1, most))
    layers = rng.randint(1, 3)
    fields = {
        "vocab_size": rng.randint(2, 40), "hidden_size": width(40), "intermediate_size": width(40),
        "moe_intermediate_size": width(40), "num_hidden_layers": layers, "num_attention_heads": rng.randint(1, 3),
        "q_lora_rank": rng.choice([None, rng.randint(1, 20)]), "kv_lora_rank": rng.randint(1, 20),
        "qk_nope_head_dim": rng.randint(1, 20), "qk_rope_head_dim": 2 * rng.randint(1, 5),
        "v_head_dim": rng.randint(1, 20), "n_routed_experts": experts, "n_group": n_group, "topk_group": topk_group,
        "num_experts_per_tok": rng.randint(1, topk_group * experts // n_group), "n_shared_experts": rng.randint(0, 2),
        "first_k_dense_replace": rng.randint(0, layers), "moe_layer_freq": rng.randint(1, 2), "rms_norm_eps": 1e-5,
        "rope_theta": 10.0 ** rng.randint(1, 6), "rope_scaling": rng.choice([None, YARN]),
        "norm_topk_prob": rng.random() < 0.5, "routed_scaling_factor": rng.uniform(0.5, 3),
        "max_position_embeddings": 64,
    }  # fmt: skip
    noise = np.random.default_rng(rng.getrandbits(32))
    tensors = {
        name: noise.standard_normal(shape, np.float32) / np.float32(4)
        for name, shape in tensor_shapes(ModelConfig.from_dict(fields)).items()
    }
    bundle = Bundle(fields, None, tensors)
    return as_file(quantize_bundle(bundle, 32) if quantised else bundle)
