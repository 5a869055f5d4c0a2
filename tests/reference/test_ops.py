"""Every operator against an independent statement of its formula."""

import itertools
import math

import numpy as np
import pytest

from reference import ops

rng = np.random.default_rng(7)
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def random(*shape, dtype=np.float64):
    return rng.standard_normal(shape).astype(dtype)


@FLOATS
def test_every_twin_keeps_the_dtype_of_x(dtype):
    x, w = random(3, 4, 8, dtype=dtype), random(5, 8, dtype=dtype)
    cos, sin = np.ones((9, 4)), np.zeros((9, 4))  # tables are float64
    qw, sc = np.zeros((5, 1), np.int32), np.ones((5, 1), np.float32)
    kv, parents = random(6, 12, dtype=dtype), np.array([-1, 0, 0])
    experts, weights = ops.moe_route(x[0, :, :4], random(4, dtype=dtype), 2, 1, 1, True, 2.5)
    gate, down = random(4, 6, 8, dtype=dtype), random(4, 8, 6, dtype=dtype)
    for y in (
        ops.embed(np.array([1, 0]), w),
        ops.rms_norm(x, w[0], 1e-5),
        ops.gemm(x, w),
        ops.w4a16_gemm(x, qw, sc, 8),
        ops.rope(x, np.array([0, 5, 8]), cos, sin),
        ops.tree_attention(x, x[..., :4], kv, 3, parents, 0.3),
        ops.swiglu(x[:, :2]),
        weights,
        ops.moe_experts(x[0], experts, weights, gate, gate, down),
    ):
        assert y.dtype == dtype


def test_embed():
    table = random(5, 3)
    assert np.array_equal(ops.embed(np.array([4, 0, 4]), table), [table[4], table[0], table[4]])


def test_rms_norm():
    y = ops.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 10.0]), 0.5)
    np.testing.assert_allclose(y, [[3 / math.sqrt(13), 40 / math.sqrt(13)]])  # mean of squares 12.5, plus eps


def test_gemm():
    x, w, add = random(2, 3, 4), random(2, 5, 4), random(2, 3, 5)
    want = np.einsum("brk,bnk->brn", x, w)
    np.testing.assert_allclose(ops.gemm(x, w), want)
    np.testing.assert_allclose(ops.gemm(x, w, add), add + want)


def test_dequantize_words():
    words = np.array([[0x76543210, 0xFEDCBA98, 0x88888888, 0x0000000F]], np.uint32).view(np.int32)
    q = [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, *[0] * 8, 7, *[-8] * 7]
    assert ops.dequantize(words, np.array([[0.5]], np.float32), 32).tolist() == [[0.5 * x for x in q]]
    halves = ops.dequantize(np.stack((words, words)), np.full((2, 1, 2), [1.0, 4.0]), 16)
    assert halves.tolist() == [[[*q[:16], *(4.0 * x for x in q[16:])]]] * 2


def test_w4a16_gemm():
    x, add = random(3, 64), random(3, 5)
    qw = rng.integers(-(2**31), 2**31, (5, 8)).astype(np.int32)
    sc = rng.random((5, 2), np.float32)
    want = [[add[r, o] + sum(x[r, i] * (((int(qw[o, i // 8]) >> 4 * (i % 8)) & 15) - 8) * float(sc[o, i // 32])
                             for i in range(64)) for o in range(5)] for r in range(3)]  # fmt: skip
    np.testing.assert_allclose(ops.w4a16_gemm(x, qw, sc, 32, add), want)


def test_rope_is_a_rotation_of_interleaved_pairs():
    x, angles, positions = random(4, 2, 6), rng.random((10, 3)) * 6, np.array([9, 0, 3, 3])
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles[positions])[:, None]
    y = ops.rope(x, positions, np.cos(angles), np.sin(angles))
    np.testing.assert_allclose(y[..., 0::2] + 1j * y[..., 1::2], turned)


def test_paths_and_depths():
    parents = np.array([-1, 0, 1, 0, 3, 2, 4])
    assert ops.depths(parents).tolist() == [0, 1, 2, 1, 2, 3, 3]
    assert [ops.path_to(parents, row) for row in (0, 5, 6)] == [[0], [0, 1, 2, 5], [0, 3, 4, 6]]


def test_tree_attention():
    parents, prefix, scale = np.array([-1, 0, 0, 2, 1]), 3, 0.3
    q, q_rope, kv = random(5, 2, 4), random(5, 2, 6), random(3 + 5, 10)
    seen = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]  # rows of the call that each row sees
    y = ops.tree_attention(q, q_rope, kv, prefix, parents, scale)
    for row, head in itertools.product(range(5), range(2)):
        keys = [0, 1, 2, *(prefix + i for i in seen[row])]
        p = [math.exp(scale * (q[row, head] @ kv[k, :4] + q_rope[row, head] @ kv[k, 4:])) for k in keys]
        want = sum(w * kv[k, :4] for w, k in zip(p, keys, strict=True)) / sum(p)
        np.testing.assert_allclose(y[row, head], want)


def test_softmax_of_large_scores():
    np.testing.assert_allclose(ops.softmax(np.array([1000.0, 1000.0, -1000.0])), [0.5, 0.5, 0])


def test_swiglu():
    y = ops.swiglu(np.array([[[1.0, -2.0], [3.0, 5.0]]]))
    np.testing.assert_allclose(y, [[3 / (1 + math.exp(-1)), -10 / (1 + math.exp(2))]])


def route_one(logits, bias, top_k, n_group, topk_group, norm, scaling):
    """The router in plain Python, one row."""
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // n_group
    group_score = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
    kept = sorted(range(n_group), key=lambda g: (-group_score[g], g))[:topk_group]
    eligible = [e for e in range(len(scores)) if e // size in kept]
    chosen = sorted(eligible, key=lambda e: (-choice[e], e))[:top_k]
    total = sum(scores[e] for e in chosen) if norm else 1
    return chosen, [scores[e] / total * scaling for e in chosen]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (2, 1), (4, 2), (4, 3)])
def test_moe_route(n_group, topk_group, norm):
    logits, bias = random(50, 8), random(8) - 1.5  # choices of both signs: a dropped group is -inf, not 0
    args = (bias, 2, n_group, topk_group, norm, 2.827)
    experts, weights = ops.moe_route(logits, *args)
    for row in range(50):
        chosen, want = route_one(logits[row], *args)
        assert experts[row].tolist() == chosen
        np.testing.assert_allclose(weights[row], want)


def test_moe_route_ties_go_to_the_lower_index():
    experts, weights = ops.moe_route(np.zeros((1, 6)), np.zeros(6), 3, 1, 1, True, 3.0)
    assert experts.tolist() == [[0, 1, 2]] and weights.tolist() == [[1, 1, 1]]
    experts, _ = ops.moe_route(np.zeros((1, 6)), np.array([0, 0, 0.5, 0, 0, 0.5]), 2, 3, 1, True, 1.0)
    assert experts.tolist() == [[2, 3]]  # groups 1 and 2 tie


@pytest.mark.parametrize("shared", [None, random(4, 6)])
@pytest.mark.parametrize("residual", [None, random(4, 6)])
def test_moe_experts(shared, residual):
    x, gate, up, down = random(4, 6), random(3, 5, 6), random(3, 5, 6), random(3, 6, 5)
    experts, weights = np.array([[0, 1], [1, 0], [1, 2], [0, 1]]), rng.random((4, 2))
    y = ops.moe_experts(x, experts, weights, gate, up, down, shared, residual)
    for row in range(4):
        want = np.zeros(6) if residual is None else residual[row].copy()
        want += 0 if shared is None else shared[row]
        for e, weight in zip(experts[row], weights[row], strict=True):
            g = gate[e] @ x[row]
            want += weight * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[row])))
        np.testing.assert_allclose(y[row], want)


def test_w4a16_moe_experts():
    def packed(*shape):
        words = rng.integers(-(2**31), 2**31, (*shape[:-1], shape[-1] // 8)).astype(np.int32)
        return words, rng.random((*shape[:-1], shape[-1] // 32))

    x, experts, weights = random(4, 64), np.array([[0, 2], [2, 1], [1, 0], [2, 0]]), rng.random((4, 2))
    gate, up, down = packed(3, 32, 64), packed(3, 32, 64), packed(3, 64, 32)
    y = ops.w4a16_moe_experts(x, experts, weights, *gate, *up, *down, 32, x, x)
    floats = [np.stack([ops.dequantize(qw[e], sc[e], 32) for e in range(3)]) for qw, sc in (gate, up, down)]
    np.testing.assert_allclose(y, ops.moe_experts(x, experts, weights, *floats, x, x))


def test_argmax():
    nan, inf = math.nan, math.inf
    rows = [[1, 3, 3, 2], [nan, 1, nan, 2], [nan, -inf, -inf, nan], [nan] * 4, [-0.0, 0.0, nan, -1], [1, inf, 2, inf]]
    assert ops.argmax(np.array(rows)).tolist() == [1, 3, 1, -1, 0, 1]
