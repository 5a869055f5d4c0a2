"""Named calls of tree_attention, each for the mistake it would show."""

from dataclasses import dataclass, replace

import numpy as np

from engine.measure import (
    BFLOAT16,
    FLOAT32,
    Case,
    Near,
    bf16,
    bfloat16_budget,
    dtype_of,
    float32_budget,
    load,
    padded,
    place,
    store,
)
from engine.operators import Call, Output, View
from reference import ops

CHAIN_9 = (-1, 0, 1, 2, 3, 4, 5, 6, 7)
STAR_9 = (-1, 0, 0, 0, 0, 0, 0, 0, 0)
RAGGED_17 = (-1, 0, 1, 0, 2, 1, 4, 6, 3, 7, 0, 8, 6, 9, 5, 13, 14)


@dataclass(frozen=True, kw_only=True)
class TreeAttentionCase(Case):
    """q_rope is a slice of wider heads, as in the engine; pool rows that no row may read are NaN."""

    parents: tuple[int, ...]
    prefix: int
    heads: int = 4
    kv_lora_rank: int = 32
    rope_dim: int = 16
    nope_dim: int = 32
    type: int = FLOAT32
    max_rows: int = 17
    scale: float = 1.0  # of the queries
    nan_row: int | None = None  # this row's KV is NaN: only it and its descendants may notice
    invariance: bool = True

    def call(self) -> Call:
        rng, n = self.rng(), len(self.parents)
        width = self.kv_lora_rank + self.rope_dim
        parents = np.array(self.parents, np.int32)
        depths = ops.depths(parents)
        q_latent = store(rng.standard_normal((n, self.heads, self.kv_lora_rank)) * self.scale, self.type)
        q = store(rng.standard_normal((n, self.heads, self.nope_dim + self.rope_dim)) * self.scale, self.type)
        kv = store(rng.standard_normal((self.prefix + n, width)), self.type)
        if self.nan_row is not None:
            kv[self.prefix + self.nan_row] = store(np.full(width, np.nan), self.type)
        return Call(
            dict(
                max_rows=self.max_rows,
                heads=self.heads,
                kv_lora_rank=self.kv_lora_rank,
                rope_dim=self.rope_dim,
                q_rope_row_stride=q.shape[1] * q.shape[2],
                q_rope_head_stride=q.shape[2],
                max_keys=self.prefix + int(depths.max()) + 1,
                type=self.type,
                softmax_scale=(self.nope_dim + self.rope_dim) ** -0.5,
            ),
            dict(
                n_rows=n,
                prefix=self.prefix,
                parents=padded(parents, self.max_rows),
                depths=padded(depths, self.max_rows),
                q_latent=padded(q_latent, self.max_rows),
                q_rope=View(padded(q, self.max_rows), self.nope_dim),
                kv=padded(kv, self.prefix + self.max_rows + 3),
                y=Output((self.max_rows, self.heads, self.kv_lora_rank), dtype_of(self.type)),
            ),
        )

    def expected(self, call, outputs):
        n = len(self.parents)
        q_latent, kv = load(call.args["q_latent"][:n]), load(call.args["kv"][: self.prefix + n])
        q_rope = load(call.args["q_rope"].base[:n, :, self.nope_dim :])
        parents, scale = call.args["parents"][:n], np.float32(call.shape["softmax_scale"])
        with np.errstate(invalid="ignore"):
            wide = (x.astype(np.float64) for x in (q_latent, q_rope, kv))
            exact = ops.tree_attention(*wide, self.prefix, parents, scale)
            if self.type == FLOAT32:
                single = ops.tree_attention(q_latent, q_rope, kv, self.prefix, parents, scale)
                budget = float32_budget(exact, single)
            else:
                budget = bfloat16_budget(exact, self._plain(q_latent, q_rope, kv, parents, scale))
        y, written = place(outputs["y"].shape, np.float64, np.arange(exact.size), exact.reshape(-1))
        return {"y": Near(y, budget, written)}

    def _plain(self, q_latent, q_rope, kv, parents, scale):
        """Eager low-precision attention: both products, their sum, the scaled scores and the weights are rounded."""
        y = np.empty_like(q_latent)
        rank = self.kv_lora_rank
        for row in range(len(parents)):
            keys = kv[[*range(self.prefix), *(self.prefix + a for a in ops.path_to(parents, row))]]
            scores = bf16(bf16(q_latent[row] @ keys[:, :rank].T) + bf16(q_rope[row] @ keys[:, rank:].T))
            y[row] = bf16(bf16(ops.softmax(bf16(scores * scale))) @ keys[:, :rank])
        return y

    def arrangements(self, call: Call):
        """Each row again at the end of its path alone: as a chain (its ancestors are rows of the call), and as
        autoregressive decoding would call it (its ancestors are committed); and the first rows of the tree alone."""
        n = len(self.parents)
        for rows in sorted({rows for rows in (1, 2, 7, n) if rows <= n}):
            yield (
                self._call_with(call, rows, range(rows), self.parents[:rows], self.prefix),
                range(rows),
                range(rows),
            )
        for row in range(n):
            path = ops.path_to(self.parents, row)
            chain = range(-1, len(path) - 1)
            yield self._call_with(call, len(path), path, chain, self.prefix), range(len(path)), path
            yield (
                self._call_with(call, 1, [row], [-1], self.prefix + len(path) - 1, committed=path[:-1]),
                [0],
                [row],
            )

    def _call_with(self, call, max_rows, rows, parents, prefix, committed=()):
        """The call with just these rows of the tree, whose KV follows the prefix and the committed rows' KV."""
        rows = list(rows)
        parents = np.array(parents, np.int32)
        depths = ops.depths(parents)
        kv = call.args["kv"][[*range(self.prefix), *(self.prefix + r for r in [*committed, *rows])]]
        args = dict(
            call.args,
            n_rows=len(rows),
            prefix=prefix,
            parents=parents,
            depths=depths,
            q_latent=call.args["q_latent"][rows],
            q_rope=View(call.args["q_rope"].base[rows], self.nope_dim),
            kv=kv,
            y=Output((max_rows, *call.args["y"].shape[1:]), call.args["y"].dtype),
        )
        shape = dict(call.shape, max_rows=max_rows, max_keys=prefix + int(depths.max()) + 1)
        return replace(call, shape=shape, args=args)


CASES = [
    TreeAttentionCase(name="root", risk="autoregressive decoding", parents=(-1,), prefix=37, max_rows=1),
    TreeAttentionCase(name="prefix_0", risk="the root's only key is itself", parents=(-1, 0, 0, 1), prefix=0),
    TreeAttentionCase(
        name="prefix_1", risk="off by one at the border of prefix and tree", parents=(-1, 0, 1), prefix=1
    ),
    TreeAttentionCase(name="ragged", risk="parent taken for depth; keys of cousins", parents=RAGGED_17, prefix=61),
    TreeAttentionCase(name="chain", risk="the deepest path: the gather's order", parents=CHAIN_9, prefix=29),
    TreeAttentionCase(name="star", risk="siblings see each other", parents=STAR_9, prefix=29),
    TreeAttentionCase(
        name="block_border",
        risk="a key block's border inside the tree: 64 keys end at depth 2",
        parents=CHAIN_9,
        prefix=61,
    ),
    TreeAttentionCase(
        name="nan_cousin",
        risk="0 x NaN: a masked key still read",
        parents=RAGGED_17,
        prefix=20,
        nan_row=4,
        invariance=False,
    ),
    TreeAttentionCase(
        name="sharp",
        risk="scores past 88: the maximum is not subtracted",
        parents=STAR_9,
        prefix=40,
        scale=60.0,
    ),
    TreeAttentionCase(
        name="long",
        risk="many key blocks; threads over rows",
        parents=RAGGED_17,
        prefix=700,
        heads=2,
        invariance=False,
    ),
    TreeAttentionCase(
        name="many_heads",
        risk="heads in groups: a second group, and a remainder",
        parents=RAGGED_17,
        prefix=61,
        heads=13,
    ),
    TreeAttentionCase(
        name="odd",
        risk="tails of vectors",
        parents=RAGGED_17,
        prefix=19,
        heads=3,
        kv_lora_rank=37,
        rope_dim=6,
        nope_dim=7,
    ),
    TreeAttentionCase(
        name="k2",
        risk="K2's latent: 512 + 64",
        parents=(-1, 0, 1, 0, 2),
        prefix=90,
        heads=8,
        kv_lora_rank=512,
        rope_dim=64,
        nope_dim=128,
        max_rows=5,
    ),
    TreeAttentionCase(name="bf16", risk="softmax and sums in fp32", parents=RAGGED_17, prefix=61, type=BFLOAT16),
    TreeAttentionCase(name="bf16_root", risk="autoregressive decoding", parents=(-1,), prefix=150, type=BFLOAT16),
    TreeAttentionCase(
        name="bf16_k2",
        risk="K2's latent: 512 + 64",
        parents=(-1, 0, 1, 0, 2),
        prefix=90,
        heads=8,
        kv_lora_rank=512,
        rope_dim=64,
        nope_dim=128,
        max_rows=5,
        type=BFLOAT16,
    ),
]
