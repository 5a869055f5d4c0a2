"""A model of any shape whose seeded weights are made where they are used: for shapes too large to keep as a file.

As released: routed experts INT4 with bf16 scales (all 16 codes occur), the router's bias F32, all else bf16.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from engine.manifest import GROUP_SIZES
from engine.mapped import NUMPY
from reference.bundle import f32_to_bf16
from reference.config import ModelConfig
from reference.tensors import tensor_shapes

BELL = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)])  # of variance 1, a byte of randomness each
CODE_RMS = math.sqrt(sum((code - 8) ** 2 for code in range(16)) / 16)
SMALL = 0.125  # what goes into a norm is small, so that eps shows
CHUNK = 1 << 22  # values at a time


@dataclass(frozen=True)
class GeneratedTensor:
    """Values are table[random byte], or, of INT4 codes, random bytes; any row can be made without the others."""

    dtype: str
    shape: tuple[int, ...]
    key: int  # of its own random stream
    table: np.ndarray | None  # of 256 values

    def load(self) -> np.ndarray:
        """The whole tensor, made anew at every call; bf16 as uint16."""
        return self._make(0, math.prod(self.shape)).reshape(self.shape)

    def row(self, index: int) -> np.ndarray:
        """One row, without the others. Rows must be multiples of eight bytes of randomness."""
        return self._make(int(index) * self.shape[1], self.shape[1])

    def release(self) -> None:
        pass

    def _make(self, first: int, count: int) -> np.ndarray:
        """Values first … first + count - 1: bytes of a stream of 64-bit words that can be entered anywhere."""
        made = np.empty(count, NUMPY[self.dtype])
        size = 1 if self.table is not None else 4  # bytes of randomness a value
        stream = np.random.PCG64(self.key)
        stream.advance(first * size // 8)
        for begin in range(0, count, CHUNK):
            end = min(begin + CHUNK, count)
            random = stream.random_raw(-(-(end - begin) * size // 8)).view(np.uint8)[: (end - begin) * size]
            made[begin:end] = random.view(np.int32) if self.table is None else self.table[random]
        return made


@dataclass(frozen=True)
class GeneratedModel:
    """What engine.native.Engine is built from."""

    fields: dict  # the config as it is spelt
    config: ModelConfig
    group_size: int
    tensors: dict[str, GeneratedTensor]


def generate_model(fields: Mapping[str, Any], seed: int, group_size: int) -> GeneratedModel:
    """Matrices of variance 1/in keep the scale of their input; all layers' branches together add the embedding's own
    variance. Raises ValueError from the config, or if the group size does not fit."""
    config = ModelConfig.from_dict(fields)
    for name in ("hidden_size", "moe_intermediate_size"):
        if group_size not in GROUP_SIZES or getattr(config, name) % group_size:
            raise ValueError(f"group_size: {group_size}: must be one of {GROUP_SIZES} and divide {name}")
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
        std = _deviation(config, name, shape)
        if ".experts." not in name:
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            values = (mean + std * BELL).astype(np.float32)
            bias = name.endswith("_bias")
            tensors[name] = GeneratedTensor(
                "F32" if bias else "BF16", shape, key, values if bias else f32_to_bf16(values)
            )
            continue
        rows, cols = shape
        stem = name.removesuffix(".weight")
        scales = f32_to_bf16((std / CODE_RMS * np.linspace(0.5, 1.5, 256)).astype(np.float32))
        tensors[stem + ".qw"] = GeneratedTensor("I32", (rows, cols // 8), key, None)
        tensors[stem + ".sc"] = GeneratedTensor("BF16", (rows, cols // group_size), key ^ 1, scales)
    return GeneratedModel(dict(fields), config, group_size, tensors)


def _deviation(config: ModelConfig, name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("norm.weight"):
        return 0.2
    if name.endswith("_bias"):
        return 0.05  # beside scores of sigmoid's range: it moves choices, but does not make them
    if name == "model.embed_tokens.weight":
        return SMALL
    std = 1 / math.sqrt(shape[1])
    if name.endswith("mlp.gate.weight"):
        return std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return std * SMALL / math.sqrt(2 * config.num_hidden_layers)
    if name.endswith("q_a_proj.weight"):
        return std * SMALL
    return std
