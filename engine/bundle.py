"""Opening a bundle for the engine: memory-mapped, checked against its config before anything is built from it.

Every error is a BundleError of one line, `<file>: <field>: <value>: <reason>`.
"""

import json
import mmap
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from reference.bundle import FORMAT
from reference.config import ModelConfig, short
from reference.tensors import is_quantised, tensor_shapes

DTYPES = {"F32": np.float32, "BF16": np.uint16, "I32": np.int32}
MAX_HEADER_BYTES = 100 << 20
GROUP_SIZES = (32, 64, 128)

Fail = Callable[[object, object, str], NoReturn]  # field, value, reason


class BundleError(ValueError):
    """The file is no bundle that the engine can run."""


@dataclass(frozen=True)
class TensorView:
    """One tensor of the mapped file; bf16 as uint16."""

    dtype: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def load(self) -> np.ndarray:
        return self.array

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class OpenBundle:
    """A checked bundle: exactly the tensors that its config asks for, in the file's order."""

    path: Path
    config: ModelConfig
    group_size: int  # of INT4 weights; 0 if there are none
    tensors: dict[str, TensorView]


def open_bundle(path: str | Path) -> OpenBundle:
    """Maps the file and checks header, config, and every tensor's name, shape, type and values."""
    path = Path(path)

    def fail(field, value, reason) -> NoReturn:
        raise BundleError(f"{path}: {short(field)}: {short(value)}: {reason}")

    header, data = _map(path, fail)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        fail("__metadata__", metadata, "not a bundle: there is no metadata")
    if metadata.get("format") != FORMAT:
        fail("format", metadata.get("format"), f"not {FORMAT}")
    config, group_size = _read_config(path, metadata, fail)
    tensors = {name: _view(name, entry, data, fail) for name, entry in header.items()}
    _check_extents(header, data.size, fail)
    _check_counts(config, len(tensors), fail)
    _check_tensors(config, group_size, tensors, fail)
    return OpenBundle(path, config, group_size, tensors)


def _map(path: Path, fail: Fail):
    """The header as a dict and the bytes behind it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            fail("file", path.name, "not a regular file")
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                fail("size", size, "too short for a safetensors file")
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        fail("file", error.strerror, "cannot be read")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        fail("header length", length, "longer than the file, or no safetensors file")
    try:
        header = json.loads(data[8 : 8 + length].tobytes(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        fail("header", error, "no safetensors file, or a damaged one")
    if not isinstance(header, dict):
        fail("header", type(header).__name__, "no safetensors file, or a damaged one")
    return header, data[8 + length :]


def _unique(pairs):
    """A JSON object; of two equal keys one would go unseen."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands there twice")
    return made


def _read_config(path: Path, metadata: dict, fail: Fail) -> tuple[ModelConfig, int]:
    parsed = {}
    for name in ("config", "quant"):
        text = metadata.get(name)
        if not isinstance(text, str):
            fail(name, text, "missing from the metadata")
        try:
            parsed[name] = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            fail(name, error, "not JSON")
    if not isinstance(parsed["config"], dict):
        fail("config", parsed["config"], "must be a map")
    try:
        config = ModelConfig.from_dict(parsed["config"])
    except ValueError as error:
        raise BundleError(f"{path}: {error}") from None
    quant = parsed["quant"]
    if quant is None:
        return config, 0
    wanted = [{"bits": 4, "group_size": size} for size in GROUP_SIZES]
    if quant not in wanted or not isinstance(quant["group_size"], int):
        fail("quant", quant, f"only 4 bits in groups of {', '.join(map(str, GROUP_SIZES))}")
    return config, quant["group_size"]


def _view(name: str, entry: object, data: np.ndarray, fail: Fail) -> TensorView:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = isinstance(dtype, str) and isinstance(shape, list) and isinstance(entry["data_offsets"], list)
        sound = sound and all(type(extent) is int and extent >= 0 for extent in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        fail(name, entry, "not a safetensors entry")
    if dtype not in DTYPES:
        fail(name, dtype, f"dtype must be one of {', '.join(DTYPES)}")
    if not 1 <= len(shape) <= 2:
        fail(name, shape, "must be a vector or a matrix")
    if max(shape) > data.size:
        fail(name, shape, f"the file holds {data.size} bytes")
    if begin > end or end > data.size:
        fail(name, f"bytes {begin} to {end}", f"the file holds {data.size}: truncated?")
    itemsize = np.dtype(DTYPES[dtype]).itemsize
    bytes_wanted = itemsize * shape[0] * (shape[1] if len(shape) == 2 else 1)
    if end - begin != bytes_wanted:
        fail(name, f"{end - begin} bytes", f"{dtype} {shape} needs {bytes_wanted}")
    array = data[begin:end].view(DTYPES[dtype]).reshape(shape)
    if array.size == 0:
        fail(name, shape, "must not be empty")
    return TensorView(dtype, array if array.flags.aligned else array.copy())  # the engine reads aligned elements


def _check_extents(header: dict, size: int, fail: Fail) -> None:
    """Tensors lie one behind the other: no overlap, no gap, nothing after the last."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != at:
            fail(name, f"starts at byte {begin}", f"the tensor before it ends at {at}")
        at = end
    if at != size:
        fail("size", size, f"the tensors end at byte {at}")


def _check_counts(config: ModelConfig, n_tensors: int, fail: Fail) -> None:
    """No more layers and experts than the file can hold, before a name is made for each of them."""
    if config.num_hidden_layers > n_tensors:
        fail("num_hidden_layers", config.num_hidden_layers, f"the file has only {n_tensors} tensors")
    moe_layers = sum(map(config.is_moe, range(config.num_hidden_layers)))
    if moe_layers * config.n_routed_experts > n_tensors:
        reason = f"in {moe_layers} layers, but the file has only {n_tensors} tensors"
        fail("n_routed_experts", config.n_routed_experts, reason)


def _check_tensors(config: ModelConfig, group_size: int, tensors: dict[str, TensorView], fail: Fail) -> None:
    """Exactly the config's tensors, each in its shape, in a type that it may have, and finite."""
    wanted = {}
    for name, shape in tensor_shapes(config).items():
        if group_size and is_quantised(name):
            stem, (rows, cols) = name.removesuffix(".weight"), shape
            if cols % group_size:
                fail(name, cols, f"columns must be a multiple of the group size {group_size}")
            wanted[stem + ".qw"] = ((rows, cols // 8), ("I32",))
            wanted[stem + ".sc"] = ((rows, cols // group_size), ("F32", "BF16"))
        else:
            wanted[name] = (shape, ("F32", "BF16"))
    for name in wanted:
        if name not in tensors:
            fail(name, "missing", "the config asks for this tensor")
    for name, tensor in tensors.items():
        if name not in wanted:
            fail(name, list(tensor.array.shape), "no tensor of this model")
        shape, dtypes = wanted[name]
        if tensor.array.shape != shape:
            fail(name, list(tensor.array.shape), f"shape must be {list(shape)}")
        if tensor.dtype not in dtypes:
            fail(name, tensor.dtype, f"dtype must be {' or '.join(dtypes)}")
        if not _is_finite(tensor.array):
            fail(name, "NaN or inf", "weights and scales must be finite")


def _is_finite(array: np.ndarray) -> bool:
    """Of float32, of bf16 as uint16 (all exponent bits set = inf or NaN), or of int32."""
    if array.dtype == np.uint16:
        return not ((array & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(array).all())
