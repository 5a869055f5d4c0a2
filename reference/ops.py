"""The numpy twin of every operator of the transformer, each in the dtype of x (float32 or float64)."""

import numpy as np
from numpy import ndarray as Array


def embed(tokens: Array, table: Array) -> Array:
    """tokens [rows], table [vocab, hidden] -> [rows, hidden]."""
    return table[tokens]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [..., cols] / sqrt(mean(x^2) + eps) * weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def gemm(x: Array, w: Array, add: Array | None = None) -> Array:
    """x [..., rows, k] @ w [..., n, k]^T (+ add) -> [..., rows, n]."""
    y = x @ w.swapaxes(-1, -2)
    return y if add is None else add + y


def dequantize(qw: Array, sc: Array, group: int) -> Array:
    """qw int32 [..., out, in/8], sc [..., out, in/group] -> (nibble - 8) * scale [..., out, in], dtype of sc.

    Column 8w+i of a row stands in bits 4i..4i+3 of word w.
    """
    nibbles = (qw.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    q = nibbles.reshape(*sc.shape, group).astype(sc.dtype) - 8
    return (q * sc[..., None]).reshape(*qw.shape[:-1], -1)


def w4a16_gemm(x: Array, qw: Array, sc: Array, group: int, add: Array | None = None) -> Array:
    """gemm with INT4 weights; the scales are taken to the dtype of x first."""
    return gemm(x, dequantize(qw, sc.astype(x.dtype), group), add)


def rope(x: Array, positions: Array, cos: Array, sin: Array) -> Array:
    """Turns pairs (2i, 2i+1) of x [rows, heads, dim] by its rows' positions; tables [positions, dim/2]."""
    c, s = (table[positions][:, None, :].astype(x.dtype) for table in (cos, sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack((even * c - odd * s, odd * c + even * s), axis=-1).reshape(x.shape)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def depths(parents: Array) -> Array:
    """parents [rows], -1 for the root, else a smaller row -> int32 [rows], distance from the root."""
    depth = np.zeros(len(parents), np.int32)
    for row, parent in enumerate(parents):
        depth[row] = 0 if parent < 0 else depth[parent] + 1
    return depth


def path_to(parents: Array, row: int) -> list[int]:
    """Rows from the root to `row`, both included: position j of the path is depth j."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def tree_attention(
    q_latent: Array, q_rope: Array, kv: Array, prefix: int, parents: Array, softmax_scale: float
) -> Array:
    """Absorbed MLA over kv [pool rows, kv_lora + rope]: q_latent [rows, heads, kv_lora] and
    q_rope [rows, heads, rope] -> [rows, heads, kv_lora].

    Row i of the call lies at pool row prefix + i and attends to [prefix | its ancestors by depth | itself],
    gathered, so that key j sits at position j.
    """
    y, rank = np.empty_like(q_latent), q_latent.shape[-1]
    for row in range(len(parents)):
        keys = kv[[*range(prefix), *(prefix + a for a in path_to(parents, row))]]
        scores = q_latent[row] @ keys[:, :rank].T + q_rope[row] @ keys[:, rank:].T
        y[row] = softmax(scores * scores.dtype.type(softmax_scale)) @ keys[:, :rank]
    return y


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def swiglu(gate_up: Array) -> Array:
    """gate_up [rows, 2, cols]: gate, then up -> silu(gate) * up, [rows, cols]."""
    return silu(gate_up[:, 0]) * gate_up[:, 1]


def moe_route(
    logits: Array,
    bias: Array,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[Array, Array]:
    """DeepSeek-V3's router: logits [rows, experts] -> (experts int32, weights), [rows, top_k], in router order.

    The bias only selects; a group scores the sum of its two best choices; ties go to the lower index; the
    weights are the unbiased sigmoids of the chosen, normalised before they are scaled.
    """
    scores = 1 / (1 + np.exp(-logits))
    choice = scores + bias
    if topk_group < n_group:
        groups = choice.reshape(len(choice), n_group, -1)
        group_scores = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
        dropped = np.argsort(-group_scores, axis=-1, kind="stable")[:, topk_group:]
        np.put_along_axis(groups, dropped[..., None], -np.inf, axis=1)  # groups is a view of choice
    experts = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, experts, axis=-1)
    if norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + weights.dtype.type(1e-20))
    return experts.astype(np.int32), weights * weights.dtype.type(scaling)


def moe_experts(
    x: Array,
    experts: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    shared: Array | None = None,
    residual: Array | None = None,
) -> Array:
    """x [rows, H], gate and up [E, I, H], down [E, H, I] -> residual + (sum of slots in router order + shared)."""
    slots = np.empty((*experts.shape, x.shape[-1]), x.dtype)
    for e in np.unique(experts):
        row, slot = np.nonzero(experts == e)
        hidden = silu(gemm(x[row], gate[e])) * gemm(x[row], up[e])
        slots[row, slot] = weights[row, slot, None] * gemm(hidden, down[e])
    y = np.zeros_like(x)
    for slot in range(experts.shape[1]):
        y = y + slots[:, slot]
    if shared is not None:
        y = y + shared
    return y if residual is None else residual + y


def w4a16_moe_experts(
    x: Array,
    experts: Array,
    weights: Array,
    gate_qw: Array,
    gate_sc: Array,
    up_qw: Array,
    up_sc: Array,
    down_qw: Array,
    down_sc: Array,
    group: int,
    shared: Array | None = None,
    residual: Array | None = None,
) -> Array:
    """moe_experts with INT4 weights, qw [E, out, in/8] and sc [E, out, in/group]."""
    packed = ((gate_qw, gate_sc), (up_qw, up_sc), (down_qw, down_sc))
    gate, up, down = (dequantize(qw, sc.astype(x.dtype), group) for qw, sc in packed)
    return moe_experts(x, experts, weights, gate, up, down, shared, residual)


def argmax(x: Array) -> Array:
    """x [rows, cols] -> int32 [rows], lowest index of the largest value; NaN never wins, a row of NaN gives -1."""
    order = np.argsort(-x, axis=-1, kind="stable")  # NaN last
    return np.where(np.isnan(x).all(axis=-1), -1, order[:, 0]).astype(np.int32)
