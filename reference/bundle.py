"""Files between stages: safetensors with BF16 and stable bytes, and the bundle (KDTR, format 1) on top.

BF16 has no numpy dtype: such a tensor is a uint16 array of its upper halves, which nothing else here uses.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from reference.config import ModelConfig
from reference.files import whole
from reference.tensors import tensor_shapes

FORMAT = "KDTR 1"
TYPES = {"F64": "<f8", "F32": "<f4", "BF16": "<u2", "I32": "<i4", "I64": "<i8"}
NAMES = {np.dtype(dtype): name for name, dtype in TYPES.items()}


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 bf16 -> float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Finite float32 -> uint16 bf16, round to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """The float32 values that bf16 can hold, nearest to x."""
    return bf16_to_f32(f32_to_bf16(x))


def as_float(x: np.ndarray) -> np.ndarray:
    """A tensor as stored -> float32 if it is BF16, else unchanged."""
    return bf16_to_f32(x) if x.dtype == np.uint16 else x


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> int:
    """Writes the file whole or not at all; the same content gives the same bytes. Returns its size in bytes.

    (The safetensors package orders metadata by a random hash and needs torch for BF16.)
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name, x in tensors.items():
        end = offset + x.nbytes
        header[name] = {"dtype": NAMES[x.dtype], "shape": x.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).data)
    return 8 + len(text) + offset


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors by name, as stored and in the file's order, and the metadata. Raises ValueError if it is damaged."""
    data = path.read_bytes()
    try:
        content = dict(safetensors.deserialize(data))  # in any order
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: {error}: not a safetensors file, or a damaged one") from None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
        x = content[name]
        if x["dtype"] not in TYPES:
            raise ValueError(f"{path}: {name}: {x['dtype']}: no type of this project's files")
        tensors[name] = np.frombuffer(x["data"], TYPES[x["dtype"]]).reshape(x["shape"])
    return tensors, metadata


@dataclass(frozen=True)
class Bundle:
    """One model in one precision: Hugging Face config fields, `{"bits": 4, "group_size": G}` or None."""

    fields: dict[str, Any]
    quant: dict[str, int] | None
    tensors: dict[str, np.ndarray]

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.fields)

    def write(self, path: Path) -> int:
        metadata = {
            "format": FORMAT,
            "config": json.dumps(self.fields, sort_keys=True),
            "quant": json.dumps(self.quant, sort_keys=True),
        }
        return write_safetensors(path, self.tensors, metadata)

    @staticmethod
    def read(path: Path) -> "Bundle":
        """Raises ValueError if the file is no bundle of this format."""
        tensors, metadata = read_safetensors(path)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path}: format: {metadata.get('format')}: not {FORMAT}")
        for name in ("config", "quant"):
            if name not in metadata:
                raise ValueError(f"{path}: {name}: missing from the metadata")
        bundle = Bundle(json.loads(metadata["config"]), json.loads(metadata["quant"]), tensors)
        for name in tensor_shapes(bundle.config):
            stem = name.removesuffix(".weight")
            if name not in tensors and not {stem + ".qw", stem + ".sc"} <= tensors.keys():
                raise ValueError(f"{path}: {name}: missing: the config asks for this tensor")
        return bundle
