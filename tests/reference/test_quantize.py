import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reference import ops, quantize
from reference.bundle import Bundle, bf16_to_f32, f32_to_bf16, round_to_bf16
from reference.quantize import pack, quantize_bundle
from reference.weights import generate_bundle

MODELS = yaml.safe_load((Path(__file__).parents[2] / "config.yaml").read_text())["models"]


def test_pack_words():
    q = np.array([[*range(-8, 8), *[0] * 8, 7, *[-8] * 7]], np.int8)
    assert pack(q).view(np.uint32).tolist() == [[0x76543210, 0xFEDCBA98, 0x88888888, 0x0000000F]]


@given(hnp.arrays(np.int8, st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda n: 32 * n)),
                  elements=st.integers(-8, 7)))  # fmt: skip
def test_dequantize_undoes_pack(q):
    scales = np.ones((len(q), q.shape[1] // 32), np.float32)
    assert np.array_equal(ops.dequantize(pack(q), scales, 32), q)


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, (3, 128), elements=st.floats(-100, 100, width=32)),
    st.sampled_from([32, 64, 128]),
)
def test_quantize_in_plain_python(w, group):
    q, scales = quantize.quantize(w, group)
    assert scales.shape == (3, 128 // group) and np.array_equal(scales, round_to_bf16(scales))
    for row in range(3):
        for g in range(128 // group):
            values = w[row, g * group : (g + 1) * group]
            scale = round_to_bf16(np.array([max(abs(values)) / np.float32(7)]))[0]
            assert scales[row, g] == scale
            for value, code in zip(values, q[row, g * group :], strict=False):
                assert code == (0 if scale == 0 else max(-7, min(7, round(float(value / scale)))))


def test_half_way_goes_to_even():
    """Of scale 1, so that halves are exact."""
    w = np.zeros((1, 32), np.float32)
    w[0, :8] = 7, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5
    q, scales = quantize.quantize(w, 32)
    assert scales.tolist() == [[1]] and q[0, :8].tolist() == [7, 0, 2, 2, 4, 0, -2, -2]


def test_error_is_at_most_half_a_step():
    w = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    for group in (32, 64, 128):
        q, scales = quantize.quantize(w, group)
        error = np.abs(ops.dequantize(pack(q), scales, group) - w).reshape(16, -1, group)
        clipped = 7 * 2**-8  # where the scale was rounded down to bf16, absmax is cut to 7
        assert (error <= (0.5001 + clipped) * scales[..., None]).all()
        assert np.abs(q).max() == 7 and q.min() == -7


def test_a_group_of_zeros():
    q, scales = quantize.quantize(np.zeros((1, 32), np.float32), 32)
    assert not q.any() and scales.tolist() == [[0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_quantised(small_model, dtype):
    source = generate_bundle(small_model, dtype)
    bundle = quantize_bundle(source, 32)
    quantised = {name for name in source.tensors if ".mlp." in name and ".gate." not in name}
    assert bundle.quant == {"bits": 4, "group_size": 32} and bundle.fields == source.fields
    expected = {name for name in source.tensors if name not in quantised}
    for name in quantised:
        out, width = source.tensors[name].shape
        qw, sc = (bundle.tensors[name.replace(".weight", part)] for part in (".qw", ".sc"))
        assert qw.dtype == np.int32 and qw.shape == (out, width // 8) and sc.shape == (out, width // 32)
        assert sc.dtype == source.tensors[name].dtype
        expected |= {name.replace(".weight", part) for part in (".qw", ".sc")}
    assert set(bundle.tensors) == expected
    assert all(bundle.tensors[name] is x for name, x in source.tensors.items() if name not in quantised)


def test_scales_are_the_same_in_both_types(small_model):
    bf16 = generate_bundle(small_model, "bfloat16")
    f32 = Bundle(bf16.fields, None, {n: bf16_to_f32(x) if x.dtype == np.uint16 else x for n, x in bf16.tensors.items()})
    a, b = quantize_bundle(bf16, 32).tensors, quantize_bundle(f32, 32).tensors
    for name, x in a.items():
        assert np.array_equal(x, f32_to_bf16(b[name]) if x.dtype == np.uint16 else b[name])


def test_refusals(small_bundle):
    with pytest.raises(ValueError, match=r"^group_size: 16: not one of 32, 64, 128$"):
        quantize_bundle(small_bundle, 16)
    name = r"model\.layers\.0\.mlp\.gate_proj\.weight"
    with pytest.raises(ValueError, match=rf"^{name}: 32 inputs: not a multiple of group size 64$"):
        quantize_bundle(small_bundle, 64)
    with pytest.raises(ValueError, match=r"^quant: .*: the bundle is quantised already$"):
        quantize_bundle(quantize_bundle(small_bundle, 32), 32)


@pytest.mark.parametrize("model", MODELS)
def test_log_line(model, tmp_path, monkeypatch, capsys):
    m = MODELS[model]
    generate_bundle(m, "float32").write(tmp_path / "in")
    arguments = ["quantize", "--bundle", str(tmp_path / "in"), "--group-size", "32", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    quantize.main()
    dense = m["first_k_dense_replace"]
    moe = (m["num_hidden_layers"] - dense) * (m["n_routed_experts"] + 1)
    assert capsys.readouterr().out == f"quantized {3 * (dense + moe)} weights (G=32)\n"
    assert Bundle.read(tmp_path / "out").quant["group_size"] == 32
