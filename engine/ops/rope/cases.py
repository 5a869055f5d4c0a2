"""Named calls of rope, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import (
    BFLOAT16,
    FLOAT32,
    Near,
    Refusal,
    RowwiseCase,
    bf16,
    bfloat16_budget,
    dtype_of,
    float32_budget,
    load,
    padded,
    place,
    rounded_once,
    store,
)
from engine.operators import Alias, Call, Output, View
from reference import ops


@dataclass(frozen=True, kw_only=True)
class RopeCase(RowwiseCase):
    """Depths are those of a ragged tree, so that a row's depth is not its index."""

    ROW_ARGS = ("x", "depths")
    rows: int
    heads: int
    dim: int
    prefix: int = 37
    type: int = FLOAT32
    max_rows: int = 17
    x_gap: int = 0  # elements before the rotated slice of a head
    y_gap: int = 0
    first_row: int | None = None
    in_place: bool = False

    @property
    def _y_gap(self):
        return self.x_gap if self.in_place else self.y_gap

    def call(self) -> Call:
        rng = self.rng()
        x_width, y_width = self.dim + self.x_gap, self.dim + self._y_gap
        depths = np.array([0, 1, 1, 2, 2, 1, 3, 2, 4] * self.rows, np.int32)[: self.rows]
        angles = np.arange(self.prefix + 6)[:, None] * 50000.0 ** (-np.arange(self.dim // 2) / (self.dim // 2))
        x = padded(store(rng.standard_normal((self.rows, self.heads, x_width)), self.type), self.max_rows)
        y = Output(((self.first_row or 0) + self.max_rows, self.heads, y_width), dtype_of(self.type))
        return Call(
            dict(
                max_rows=self.max_rows,
                heads=self.heads,
                dim=self.dim,
                x_row_stride=self.heads * x_width,
                x_head_stride=x_width,
                y_row_stride=self.heads * y_width,
                y_head_stride=y_width,
                type=self.type,
            ),
            dict(
                n_rows=self.rows,
                prefix=self.prefix,
                depths=padded(depths, self.max_rows),
                cos=np.cos(angles).astype(np.float32),
                sin=np.sin(angles).astype(np.float32),
                x=Alias("y") if self.in_place else View(x, self.x_gap),
                y=View(x if self.in_place else y, self._y_gap),
                y_first_row=self.first_row,
            ),
        )

    def expected(self, call, outputs):
        stored = call.args["y" if self.in_place else "x"].base
        x = load(stored[: self.rows, :, self.x_gap :])
        cos, sin = call.args["cos"], call.args["sin"]
        positions = self.prefix + call.args["depths"][: self.rows]
        exact = ops.rope(x.astype(np.float64), positions, cos, sin)
        if self.type == FLOAT32:
            budget = float32_budget(exact, ops.rope(x, positions, cos, sin))
        else:  # plain code has tables in bf16 and rounds both products and their sum
            c, s = (bf16(table)[positions][:, None] for table in (cos, sin))
            even, odd = x[..., 0::2], x[..., 1::2]
            pair = (bf16(bf16(even * c) - bf16(odd * s)), bf16(bf16(odd * c) + bf16(even * s)))
            budget = bfloat16_budget(exact, np.stack(pair, -1).reshape(x.shape))
        shape = outputs["y"].shape
        r, h, c = np.ogrid[: self.rows, : self.heads, : self.dim]
        index = ((r + (self.first_row or 0)) * self.heads + h) * shape[2] + self._y_gap + c
        y, written = place(shape, np.float64, index, exact)
        near = Near(y, budget, written, before=stored if self.in_place else None)
        return rounded_once(near) if self.type == BFLOAT16 else {"y": near}


_SHAPE = RopeCase(name="", risk="", rows=1, heads=1, dim=16).call().shape

CASES = [
    RopeCase(
        name="heads",
        risk="position is depth, not row; pairs are (2i, 2i+1)",
        rows=9,
        heads=4,
        dim=16,
        invariance=True,
    ),
    RopeCase(
        name="key_into_pool",
        risk="the last columns of a wider row; the KV row is first_row + i",
        rows=9,
        heads=1,
        dim=16,
        x_gap=48,
        y_gap=32,
        first_row=37,
        invariance=True,
    ),
    RopeCase(
        name="in_place",
        risk="a pair overwritten before its other half is read",
        rows=9,
        heads=6,
        dim=16,
        x_gap=32,
        in_place=True,
    ),
    RopeCase(name="prefix_0", risk="position 0 does not rotate", rows=1, heads=2, dim=32, prefix=0, max_rows=1),
    RopeCase(
        name="far",
        risk="positions past 10,000: angles are not recomputed in fp32",
        rows=5,
        heads=2,
        dim=64,
        prefix=12000,
    ),
    RopeCase(name="one_pair", risk="shorter than any vector", rows=3, heads=3, dim=2),
    RopeCase(name="odd_pairs", risk="tail of a vector", rows=7, heads=2, dim=38, x_gap=1, y_gap=3),
    RopeCase(
        name="bf16",
        risk="one rounding; tables stay float32",
        rows=9,
        heads=4,
        dim=64,
        type=BFLOAT16,
        invariance=True,
    ),
    RopeCase(
        name="bf16_in_place",
        risk="a pair overwritten before its other half is read",
        rows=9,
        heads=2,
        dim=16,
        x_gap=9,
        type=BFLOAT16,
        in_place=True,
    ),
]

REFUSALS = [Refusal("odd_dim", dict(_SHAPE, dim=15), "dim")]
