"""The forward pass against itself, computed another way. (Against other people's: tests/oracles.)"""

import numpy as np
import pytest

from reference import ops
from reference.model import Model, chain
from reference.quantize import quantize_bundle
from reference.weights import generate_bundle

TOKENS = np.random.default_rng(3).integers(0, 64, 40)
# A tree with siblings whose subtrees interleave, so that rows differ from depths.
PARENTS = np.array([-1, 0, 0, 1, 2, 2, 3, 0, 4, 6])


@pytest.fixture(scope="module", params=["float", "int4", "no q_lora, no shared expert"])
def model(request, small_bundle):
    if request.param == "int4":
        return Model(quantize_bundle(small_bundle, 32))
    if request.param == "float":
        return Model(small_bundle)
    changes = {"q_lora_rank": None, "n_shared_experts": 0, "n_group": 1, "topk_group": 1}
    return Model(generate_bundle(small_bundle.fields | {"seed": 1} | changes, "float32"))


def full(model: Model, tokens: np.ndarray, mla=None) -> np.ndarray:
    return model.forward(tokens, model.empty_kv(len(tokens)), 0, chain(len(tokens)), mla)


def test_absorbed_equals_naive(model):
    np.testing.assert_allclose(full(model, TOKENS), full(model, TOKENS, model.mla_naive), atol=1e-12)


def test_absorbed_equals_naive_on_a_tree(model):
    for mla in (model.mla_absorbed, model.mla_naive):
        kv = model.empty_kv(60)
        model.forward(TOKENS[:20], kv, 0, chain(20), mla)
        logits = model.forward(TOKENS[20:30], kv, 20, PARENTS, mla)
        if mla == model.mla_absorbed:
            want = logits, kv
    np.testing.assert_allclose(logits, want[0], atol=1e-12)
    np.testing.assert_allclose(kv, want[1], atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_cached_equals_full_recompute(model, chunk):
    kv, rows = model.empty_kv(len(TOKENS)), []
    for start in range(0, len(TOKENS), chunk):
        tokens = TOKENS[start : start + chunk]
        rows.append(model.forward(tokens, kv, start, chain(len(tokens))))
    np.testing.assert_allclose(np.concatenate(rows), full(model, TOKENS), atol=1e-12)


def test_tree_row_equals_its_path_as_a_sequence(model):
    kv = model.empty_kv(40)
    model.forward(TOKENS[:20], kv, 0, chain(20))
    tree = model.forward(TOKENS[20:30], kv, 20, PARENTS)
    for row in range(10):
        path = [20 + r for r in ops.path_to(PARENTS, row)]
        np.testing.assert_allclose(tree[row], full(model, TOKENS[[*range(20), *path]])[-1], atol=1e-12)


def test_a_tree_writes_its_rows_and_nothing_else(model):
    kv = model.empty_kv(40)
    kv[:] = 7
    model.forward(TOKENS[:10], kv, 20, PARENTS)
    assert (kv[:, :20] == 7).all() and (kv[:, 30:] == 7).all() and (kv[:, 20:30] != 7).all()


def test_float32_is_near_float64(small_bundle):
    single, double = Model(small_bundle, np.float32), Model(small_bundle)
    a, b = full(single, TOKENS), full(double, TOKENS)
    assert a.dtype == np.float32 and b.dtype == np.float64 and 0 < np.abs(a - b).max() < 1e-5


def test_int4_is_the_dequantised_model(small_bundle):
    int4 = quantize_bundle(small_bundle, 32)
    tensors = dict(small_bundle.tensors)
    for name in int4.tensors:
        if name.endswith(".qw"):
            stem = name.removesuffix(".qw")
            tensors[stem + ".weight"] = ops.dequantize(int4.tensors[name], int4.tensors[stem + ".sc"], 32)
    twin = Model(type(int4)(int4.fields, None, tensors))
    np.testing.assert_allclose(full(Model(int4), TOKENS), full(twin, TOKENS), atol=1e-12)


def test_kv_b_is_head_by_head_keys_then_values(small_bundle):
    model, p = Model(small_bundle), "model.layers.0.self_attn."
    w_uk, w_uv = model.kv_b(p)
    rows = model.weights[p + "kv_b_proj.weight"]  # 2 heads of 8 key and 12 value rows
    assert np.array_equal(w_uk, [rows[:8], rows[20:28]]) and np.array_equal(w_uv, [rows[8:20], rows[28:]])
