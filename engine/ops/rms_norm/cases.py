"""Named calls of rms_norm, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import (
    BFLOAT16,
    FLOAT32,
    Near,
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
from engine.operators import Call, Output, View
from reference import ops


@dataclass(frozen=True, kw_only=True)
class RmsNormCase(RowwiseCase):
    ROW_ARGS = ("x",)
    rows: int
    cols: int
    type: int = FLOAT32
    max_rows: int = 17
    x_stride: int = 0  # elements; 0: cols
    x_offset: int = 0  # the norm covers a slice of a wider row, which starts here
    y_stride: int = 0
    first_row: int | None = None
    eps: float = 1e-5
    scale: float = 1.0

    def call(self) -> Call:
        rng = self.rng()
        x_stride, y_stride = self.x_stride or self.cols, self.y_stride or self.cols
        x = rng.standard_normal((self.rows, x_stride)) * self.scale
        x[0] = 0  # 0 / sqrt(0 + eps)
        return Call(
            dict(
                max_rows=self.max_rows,
                cols=self.cols,
                x_row_stride=x_stride,
                y_row_stride=y_stride,
                type=self.type,
                eps=self.eps,
            ),
            dict(
                n_rows=self.rows,
                x=View(padded(store(x, self.type), self.max_rows), self.x_offset),
                weight=store(1 + 0.3 * rng.standard_normal(self.cols), self.type),
                y=Output(((self.first_row or 0) + self.max_rows, y_stride), dtype_of(self.type)),
                y_first_row=self.first_row,
            ),
        )

    def expected(self, call, outputs):
        x = load(call.args["x"].base[: self.rows, self.x_offset : self.x_offset + self.cols])
        weight, eps = load(call.args["weight"]), np.float32(self.eps)
        exact = ops.rms_norm(x.astype(np.float64), weight.astype(np.float64), eps)
        if self.type == FLOAT32:
            budget = float32_budget(exact, ops.rms_norm(x, weight, eps))
        else:  # plain code normalises in fp32, rounds, and rounds the product with the weight
            ones = np.ones_like(weight)
            budget = bfloat16_budget(exact, bf16(bf16(ops.rms_norm(x, ones, eps)) * weight))
        stride = outputs["y"].shape[1]
        rows = np.arange(self.rows)[:, None] + (self.first_row or 0)
        y, written = place(outputs["y"].shape, np.float64, rows * stride + np.arange(self.cols), exact)
        near = Near(y, budget, written)
        return rounded_once(near) if self.type == BFLOAT16 else {"y": near}


CASES = [
    RmsNormCase(name="rows", risk="a zero row; rows past n keep their bytes", rows=9, cols=128, invariance=True),
    RmsNormCase(name="odd_width", risk="tail of a vector", rows=9, cols=37, invariance=True),
    RmsNormCase(name="one_column", risk="shorter than any vector", rows=5, cols=1),
    RmsNormCase(
        name="latent_into_pool",
        risk="different row strides of x and y; the KV row is first_row + i",
        rows=9,
        cols=48,
        x_stride=64,
        y_stride=64,
        first_row=23,
        eps=1e-6,
        invariance=True,
    ),
    RmsNormCase(
        name="odd_offset",
        risk="a slice that starts at an odd element: no aligned loads",
        rows=7,
        cols=33,
        x_stride=71,
        x_offset=3,
        y_stride=35,
    ),
    RmsNormCase(name="small", risk="eps decides: x near sqrt(eps)", rows=5, cols=96, scale=1e-3),
    RmsNormCase(name="large", risk="squares near 1e8", rows=5, cols=96, scale=1e4),
    RmsNormCase(name="wide", risk="K2's hidden size: long sum", rows=3, cols=7168),
    RmsNormCase(name="bf16", risk="one rounding, at the end", rows=9, cols=128, type=BFLOAT16, invariance=True),
    RmsNormCase(
        name="bf16_odd_offset",
        risk="2-byte values at odd addresses",
        rows=7,
        cols=37,
        x_stride=47,
        x_offset=5,
        y_stride=41,
        first_row=3,
        type=BFLOAT16,
    ),
]
