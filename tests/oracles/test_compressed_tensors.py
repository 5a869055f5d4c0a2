"""Packing and unpacking against the package that the Kimi releases were packed with."""

import numpy as np
import pytest

from reference import ops
from reference.quantize import pack, quantize

pytest.importorskip("compressed_tensors", reason="the compressed-tensors oracle is not installed")
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

pytestmark = pytest.mark.oracle

SHAPES = [(1, 32), (5, 96), (64, 192), (512, 7168)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_agrees_on_every_code(shape):
    q = np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)
    packed = pack(q)
    assert np.array_equal(packed, pack_to_int32(torch.from_numpy(q), 4).numpy())
    assert np.array_equal(unpack_from_int32(torch.from_numpy(packed), 4, torch.Size(shape)).numpy(), q)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_dequantize_agrees(group):
    w = np.random.default_rng(1).standard_normal((24, 384)).astype(np.float32)
    q, scales = quantize(w, group)
    codes = unpack_from_int32(torch.from_numpy(pack(q)), 4, torch.Size(w.shape)).numpy()
    want = (codes.reshape(24, -1, group) * scales[..., None]).reshape(w.shape)
    assert np.array_equal(ops.dequantize(pack(q), scales, group), want)
