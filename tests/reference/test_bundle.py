import json
import os

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from reference.bundle import (
    Bundle,
    bf16_to_f32,
    f32_to_bf16,
    read_safetensors,
    round_to_bf16,
    write_safetensors,
)

TENSORS = {
    "f": np.array([[1.5, -2.0]], np.float32),
    "b": f32_to_bf16(np.array([1.0, 3.0, -0.5], np.float32)),
    "i": np.array([-1, 2**31 - 1], np.int32),
    "d": np.array(0.1),
}


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1 + 2**-8, 0x3F80),  # halfway, down to even
        (1 + 3 * 2**-8, 0x3F82),  # halfway, up to even
        (1 + 2**-8 + 2**-20, 0x3F81),
        (3.4e38, 0x7F80),  # past the largest bf16
        (-0.0, 0x8000),
    ],
)
def test_bf16_rounds_to_nearest_even(value, bits):
    assert f32_to_bf16(np.array([value], np.float32)).tolist() == [bits]


def test_bf16_round_trip():
    finite = np.array([x for x in range(2**16) if x & 0x7F80 != 0x7F80], np.uint16)
    assert np.array_equal(f32_to_bf16(bf16_to_f32(finite)), finite)
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert (np.abs(round_to_bf16(x) - x) <= np.abs(x) * 2**-8).all()


def test_round_trip_and_same_bytes(tmp_path):
    metadata = {"z": "1", "a": "ü"}
    size = write_safetensors(tmp_path / "deep" / "x", TENSORS, metadata)
    write_safetensors(tmp_path / "y", TENSORS, dict(reversed(metadata.items())))
    data = (tmp_path / "deep" / "x").read_bytes()
    assert data == (tmp_path / "y").read_bytes() and len(data) == size
    tensors, read = read_safetensors(tmp_path / "y")
    assert read == metadata and list(tmp_path.iterdir()) == [tmp_path / "deep", tmp_path / "y"]
    for name, x in TENSORS.items():
        assert tensors[name].dtype == x.dtype and tensors[name].shape == x.shape
        assert np.array_equal(tensors[name], x)


def test_the_safetensors_package_reads_it(tmp_path):
    write_safetensors(tmp_path / "x", TENSORS, {"format": "any"})
    with safetensors.safe_open(tmp_path / "x", "np") as file:
        assert set(file.keys()) == set(TENSORS) and file.metadata() == {"format": "any"}
        assert file.get_slice("b").get_dtype() == "BF16"
        assert np.array_equal(file.get_tensor("f"), TENSORS["f"])


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(part, path):
        assert part != path and part.stat().st_size
        raise OSError("disk full")

    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        write_safetensors(tmp_path / "x", TENSORS, {})
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "old"


def test_bundle(small_bundle, tmp_path):
    quantised = Bundle(small_bundle.fields, {"bits": 4, "group_size": 32}, small_bundle.tensors)
    for bundle in (small_bundle, quantised):
        bundle.write(tmp_path / "x")
        read = Bundle.read(tmp_path / "x")
        assert read.fields == bundle.fields and read.quant == bundle.quant and read.config == bundle.config
        assert list(read.tensors) and all(np.array_equal(read.tensors[n], x) for n, x in bundle.tensors.items())
    _, metadata = read_safetensors(tmp_path / "x")
    assert metadata["format"] == "KDTR 1" and json.loads(metadata["config"])["hidden_size"] == 32


def test_foreign_files_are_refused(tmp_path):
    safetensors.numpy.save_file({"f": TENSORS["f"]}, tmp_path / "x", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="x: format: pt: not KDTR 1"):
        Bundle.read(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="x: "):
        Bundle.read(tmp_path / "x")
