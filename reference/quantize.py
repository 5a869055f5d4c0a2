"""Group INT4: quantiser and packer. (dequantize is an operator: reference/ops.py.)

python -m reference.quantize --bundle FILE --group-size 32|64|128 --output FILE
"""

from pathlib import Path

import numpy as np

from reference import stage
from reference.bundle import Bundle, as_float, f32_to_bf16, round_to_bf16
from reference.tensors import is_quantised

BITS = 4
GROUP_SIZES = (32, 64, 128)


def quantize(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """w float32 [out, in] -> (q int8 [out, in] in -7..7, scales float32 [out, in/group] of bf16 values).

    scale = absmax / 7 of a group, rounded to bf16 first; q = w / scale, rounded half to even. A group of zeros
    has scale 0 and q 0.
    """
    groups = w.reshape(len(w), -1, group)
    scales = round_to_bf16(np.abs(groups).max(axis=-1) / np.float32(7))
    divisor = np.where(scales == 0, np.float32(1), scales)[..., None]
    q = np.clip(np.rint(groups / divisor), -7, 7).astype(np.int8)
    return q.reshape(w.shape), scales


def pack(q: np.ndarray) -> np.ndarray:
    """q int8 [out, in], -8..7 -> int32 [out, in/8]: q + 8 of column 8w+i in bits 4i..4i+3 of word w."""
    codes = (q.astype(np.int32) + 8).astype(np.uint32).reshape(len(q), -1, 8)
    words = codes << (4 * np.arange(8, dtype=np.uint32))
    return np.bitwise_or.reduce(words, axis=-1).view(np.int32)


def quantize_bundle(bundle: Bundle, group: int) -> Bundle:
    """Raises ValueError, naming the tensor, if a width is no multiple of the group."""
    if group not in GROUP_SIZES:
        raise ValueError(f"group_size: {group}: not one of {', '.join(map(str, GROUP_SIZES))}")
    if bundle.quant:
        raise ValueError(f"quant: {bundle.quant}: the bundle is quantised already")
    tensors = {}
    for name, w in bundle.tensors.items():
        if not is_quantised(name):
            tensors[name] = w
            continue
        if w.shape[1] % group:
            raise ValueError(f"{name}: {w.shape[1]} inputs: not a multiple of group size {group}")
        q, scales = quantize(as_float(w), group)
        stem = name.removesuffix(".weight")
        tensors[stem + ".qw"] = pack(q)
        tensors[stem + ".sc"] = f32_to_bf16(scales) if w.dtype == np.uint16 else scales
    return Bundle(bundle.fields, {"bits": BITS, "group_size": group}, tensors)


def main() -> None:
    parser = stage.Parser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    bundle = quantize_bundle(Bundle.read(args.bundle), args.group_size)
    bundle.write(args.output)
    print(f"quantized {sum(name.endswith('.qw') for name in bundle.tensors)} weights (G={args.group_size})")


if __name__ == "__main__":
    stage.run(main)
