"""Goldens, runs and operator checks as the verdict reads them."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from reference.bundle import read_safetensors
from reference.files import read_json


@dataclass(frozen=True)
class Golden:
    """What the reference decodes from one prompt."""

    prompt: np.ndarray  # [p] int32
    tokens: np.ndarray  # [t] int32
    logits: np.ndarray  # [t, vocab] float32: row i chooses token i
    noise: float  # numpy float32's own distance from float64


@dataclass(frozen=True)
class Bf16Golden:
    """What the reference says of the golden's tokens with bf16-rounded weights (reference/bf16.py)."""

    logits: np.ndarray  # [t, vocab] float64 rounded to float32: row i after the first i golden tokens
    errors: np.ndarray  # [t] the largest |plain torch bf16 - float64| of each row


@dataclass(frozen=True)
class Decoded:
    """What the engine decodes from one prompt. Committed row r chooses token r and stands at position p - 1 + r."""

    tokens: np.ndarray  # [t] int32, after the cut by stop token and limit
    logits: np.ndarray  # [rows, vocab] float32
    kv: np.ndarray  # [layers, positions, kv_lora + rope], the prompt's positions first
    rounds: np.ndarray  # [steps + 1, 2] int32: rows of the verify call, rows committed; round 0 yields the first token
    overrun: np.ndarray  # int32, plain decoding only: tokens past the cut, for the drafters
    forced_logits: np.ndarray  # [t, vocab], plain bf16 decoding only: row t after the first t golden tokens
    stats: dict  # steps, committed, stop_reason, and the sha256 of every round's logits and KV rows

    @cached_property
    def starts(self) -> np.ndarray:
        """[steps + 2]: the first committed row of every round, then the number of all."""
        return np.concatenate(([0], np.cumsum(self.rounds[:, 1])))

    @property
    def before(self) -> int:
        """KV positions before row 0: the prompt without its last token."""
        return self.kv.shape[1] - int(self.starts[-1])

    def round_of(self, row: int) -> int:
        """The round that commits `row`; the prompt's own rows count as round 0's."""
        return int(np.searchsorted(self.starts, max(row, 0), side="right")) - 1


@dataclass(frozen=True)
class Run:
    file: str
    settings: dict  # mode, backend, activations, block_size, tree_budget, drafter, cpu, operators …
    prompts: dict[str, Decoded]


@dataclass(frozen=True)
class Check:
    """One operator against its numpy twin: cases of name, max_abs_error (may be inf or NaN), budget, message if any."""

    operator: str
    backend: str
    cases: list[dict]


def read_goldens(file: str) -> dict[str, Golden]:
    tensors, metadata = read_safetensors(Path(file))
    if "names" not in metadata:
        raise ValueError(f"{file}: names: missing: this is no golden")
    return {
        name: Golden(
            tensors[f"{name}.prompt"],
            tensors[f"{name}.tokens"],
            tensors[f"{name}.logits"],
            float(tensors[f"{name}.noise"].item()),
        )
        for name in json.loads(metadata["names"])
    }


def read_bf16_goldens(file: str) -> dict[str, Bf16Golden]:
    tensors, metadata = read_safetensors(Path(file))
    return {
        name: Bf16Golden(tensors[f"{name}.logits"], tensors[f"{name}.errors"]) for name in json.loads(metadata["names"])
    }


def read_run(file: str) -> Run:
    tensors, metadata = read_safetensors(Path(file))
    if "kdtree" not in metadata:
        raise ValueError(f"{file}: kdtree: missing: this is no run")
    settings = json.loads(metadata["kdtree"])
    nothing = np.empty(0, np.int32)
    return Run(
        file,
        settings,
        {
            stats["name"]: Decoded(
                *(tensors[f"{stats['name']}.{tensor}"] for tensor in ("tokens", "logits", "kv", "rounds")),
                *(tensors.get(f"{stats['name']}.{tensor}", nothing) for tensor in ("overrun", "forced_logits")),
                stats,
            )
            for stats in settings.pop("prompts")
        },
    )


def read_check(file: str) -> Check:
    check = read_json(Path(file))
    cases = [case | {"max_abs_error": float(case["max_abs_error"])} for case in check["cases"]]
    return Check(check["operator"], check["backend"], cases)
