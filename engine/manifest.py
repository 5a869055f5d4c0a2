"""What the files of a model must hold: every tensor that its config asks for, its shape, its types, finite values."""

from collections.abc import Collection

import numpy as np

from engine.mapped import Fail
from reference.config import ModelConfig
from reference.tensors import is_quantised, tensor_shapes

GROUP_SIZES = (32, 64, 128)  # of INT4 weights
FLOATS = ("F32", "BF16")


def wanted_tensors(config: ModelConfig, group_size: int, present: Collection[str], fail: Fail):
    """Name -> (shape, dtypes) of the config's tensors; a matrix that is present as `.qw` or `.sc` is wanted as both.

    `group_size` is 0 if no matrix may be INT4.
    """
    _check_counts(config, len(present), fail)
    wanted = {}
    for name, shape in tensor_shapes(config).items():
        stem = name.removesuffix(".weight")
        if stem + ".qw" not in present and stem + ".sc" not in present:
            wanted[name] = (shape, FLOATS)
            continue
        rows, cols = shape
        if not group_size or not is_quantised(name):
            fail(name, "INT4", "not one of the matrices that may be INT4 here")
        if cols % group_size:
            fail(name, cols, f"columns must be a multiple of the group size {group_size}")
        wanted[stem + ".qw"] = ((rows, cols // 8), ("I32",))
        wanted[stem + ".sc"] = ((rows, cols // group_size), FLOATS)
    return wanted


def check_tensor(tensor, wanted: tuple[tuple[int, ...], tuple[str, ...]], fail: Fail, name: str) -> None:
    """`tensor` has `shape` and `dtype`; `wanted` is an entry of wanted_tensors()."""
    shape, dtypes = wanted
    if tensor.shape != shape:
        fail(name, list(tensor.shape), f"shape must be {list(shape)}")
    if tensor.dtype not in dtypes:
        fail(name, tensor.dtype, f"dtype must be {' or '.join(dtypes)}")


def is_finite(array: np.ndarray) -> bool:
    """Of float32, of bf16 as uint16, or of int32. A part at a time: it takes no memory worth naming."""
    if array.dtype == np.int32:
        return True
    flat = array.reshape(-1)
    for begin in range(0, flat.size, 1 << 18):
        part = flat[begin : begin + (1 << 18)]
        if part.dtype == np.uint16:  # without their sign, inf and NaN are the largest numbers
            if (part << np.uint16(1)).max() >= 0xFF00:
                return False
        elif not np.isfinite(part).all():
            return False
    return True


def _check_counts(config: ModelConfig, n_tensors: int, fail: Fail) -> None:
    """No more layers and experts than the files can hold, before a name is made for each of them."""
    if config.num_hidden_layers > n_tensors:
        fail("num_hidden_layers", config.num_hidden_layers, f"there are only {n_tensors} tensors")
    moe_layers = sum(map(config.is_moe, range(config.num_hidden_layers)))
    if moe_layers * config.n_routed_experts > n_tensors:
        reason = f"in {moe_layers} layers, but there are only {n_tensors} tensors"
        fail("n_routed_experts", config.n_routed_experts, reason)
