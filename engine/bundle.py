"""Opening a bundle for the engine: memory-mapped, checked against its config before anything is built from it.

Every error is a BundleError of one line, `<file>: <field>: <value>: <reason>`.
"""

import json
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reference.bundle import FORMAT
from reference.config import ModelConfig
from reference.tensors import is_quantised, tensor_shapes

DTYPES = {"F32": np.float32, "BF16": np.uint16, "I32": np.int32}
MAX_HEADER_BYTES = 100 << 20
GROUP_SIZES = (32, 64, 128)


class BundleError(ValueError):
    """The file is no bundle that the engine can run."""


@dataclass(frozen=True)
class TensorView:
    """One tensor of the mapped file; bf16 as uint16."""

    dtype: str
    array: np.ndarray


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

    def fail(field, value, reason):
        raise BundleError(f"{path}: {field}: {value}: {reason}")

    header, data = _map(path, fail)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        fail("format", metadata.get("format") if isinstance(metadata, dict) else metadata, f"not {FORMAT}")
    config, group_size = _read_config(path, metadata, fail)
    tensors = {name: _view(name, entry, data, fail) for name, entry in header.items()}
    _check_extents(header, data.size, fail)
    _check_names(config, group_size, tensors, fail)
    for name, tensor in tensors.items():
        if tensor.dtype != "I32" and not _is_finite(tensor.array):
            fail(name, "NaN or inf", "weights and scales must be finite")
    return OpenBundle(path, config, group_size, tensors)


def _map(path, fail):
    """The header as a dict and the bytes behind it."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                fail("size", size, "too short for a safetensors file")
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise BundleError(f"{path}: file: {error.strerror}: cannot be read") from None
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        fail("header length", length, "longer than the file, or no safetensors file")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        fail("header", "not JSON", "no safetensors file, or a damaged one")
    return header, data[8 + length :]


def _read_config(path, metadata, fail):
    for name in ("config", "quant"):
        if not isinstance(metadata.get(name), str):
            fail(name, metadata.get(name), "missing from the metadata")
    try:
        fields, quant = json.loads(metadata["config"]), json.loads(metadata["quant"])
        if not isinstance(fields, dict):
            raise ValueError("config: not a map: must be a map")
        config = ModelConfig.from_dict(fields)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: config: {error}") from None
    if quant is None:
        return config, 0
    if not isinstance(quant, dict) or quant.get("bits") != 4 or quant.get("group_size") not in GROUP_SIZES:
        fail("quant", quant, f"only 4 bits in groups of {', '.join(map(str, GROUP_SIZES))}")
    return config, quant["group_size"]


def _view(name, entry, data, fail):
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = all(isinstance(x, int) and x >= 0 for x in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        fail(name, entry, "not a safetensors entry")
    if dtype not in DTYPES:
        fail(name, dtype, f"dtype must be one of {', '.join(DTYPES)}")
    bytes_wanted = np.dtype(DTYPES[dtype]).itemsize
    for extent in shape:
        bytes_wanted *= extent
    if begin > end or end > data.size:
        fail(name, f"bytes {begin} to {end}", f"the file holds {data.size}: truncated?")
    if end - begin != bytes_wanted:
        fail(name, f"{end - begin} bytes", f"{dtype} {shape} needs {bytes_wanted}")
    return TensorView(dtype, data[begin:end].view(DTYPES[dtype]).reshape(shape))


def _check_extents(header, size, fail):
    """Tensors lie one behind the other: no overlap, no gap, nothing after the last."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != at:
            fail(name, f"starts at byte {begin}", f"the tensor before it ends at {at}")
        at = end
    if at != size:
        fail("size", size, f"the tensors end at byte {at}")


def _check_names(config, group_size, tensors, fail):
    """Exactly the config's tensors, each in its shape and in a type that it may have."""
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


def _is_finite(array) -> bool:
    """Of float32, or of bf16 as uint16 (all exponent bits set = inf or NaN)."""
    if array.dtype == np.uint16:
        return not ((array & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(array).all())
