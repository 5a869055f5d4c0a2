"""Named calls of swiglu, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import (
    BFLOAT16,
    FLOAT32,
    Exact,
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
from engine.operators import Call, Output
from reference import ops


@dataclass(frozen=True, kw_only=True)
class SwigluCase(RowwiseCase):
    ROW_ARGS = ("gate_up",)
    rows: int
    cols: int
    type: int = FLOAT32
    max_rows: int = 17
    scale: float = 2.0

    def call(self) -> Call:
        x = self.rng().standard_normal((self.rows, 2, self.cols)) * self.scale
        x[0, 0] = 0
        return Call(
            dict(max_rows=self.max_rows, cols=self.cols, type=self.type),
            dict(
                n_rows=self.rows,
                gate_up=padded(store(x, self.type), self.max_rows),
                y=Output((self.max_rows, self.cols), dtype_of(self.type)),
            ),
        )

    def expected(self, call, outputs):
        x = load(call.args["gate_up"][: self.rows])
        with np.errstate(over="ignore"):
            exact = ops.swiglu(x.astype(np.float64))
            if self.type == FLOAT32:
                budget = float32_budget(exact, ops.swiglu(x))
            else:  # plain code rounds silu(gate), then the product
                budget = bfloat16_budget(exact, bf16(bf16(ops.silu(x[:, 0])) * x[:, 1]))
        y, written = place(outputs["y"].shape, np.float64, np.arange(exact.size), exact.reshape(-1))
        near = Near(y, budget, written)
        return rounded_once(near) if self.type == BFLOAT16 else {"y": near}


@dataclass(frozen=True, kw_only=True)
class SameColumns(SwigluCase):
    """Every column of a row holds the same pair, so all outputs of the row must have the bytes of the first: the exp
    of a vector's body and that of its tail are one code."""

    def call(self) -> Call:
        call = super().call()
        gate_up = call.args["gate_up"].copy()
        gate_up[...] = gate_up[:, :, :1]
        return Call(call.shape, dict(call.args, gate_up=gate_up))

    def expected(self, call, outputs):
        y = np.broadcast_to(outputs["y"][:, :1], outputs["y"].shape)
        return {"y": Exact(y, (np.arange(self.max_rows) < self.rows)[:, None])}


CASES = [
    SwigluCase(name="rows", risk="gate 0; rows past n keep their bytes", rows=9, cols=256, invariance=True),
    SwigluCase(name="odd_width", risk="tail of a vector", rows=9, cols=37, invariance=True),
    SameColumns(name="same_columns", risk="another exp in the tail of a vector", rows=17, cols=45, max_rows=17),
    SwigluCase(name="one_column", risk="shorter than any vector", rows=3, cols=1),
    SwigluCase(name="saturated", risk="exp overflows for gates below -88", rows=7, cols=65, scale=80.0),
    SwigluCase(name="wide", risk="dense layer of K2", rows=2, cols=18432),
    SwigluCase(name="bf16", risk="one rounding, at the end", rows=9, cols=96, type=BFLOAT16, invariance=True),
    SwigluCase(name="bf16_odd_width", risk="the up half starts at an odd address", rows=5, cols=33, type=BFLOAT16),
]
