"""Named calls of gemm, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import (
    BFLOAT16,
    FLOAT32,
    Near,
    RowwiseCase,
    accumulation_budget,
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
class GemmCase(RowwiseCase):
    """x lies as [rows, batch, k + gap] and y as [rows, batch, n + gap], as the heads of a row do."""

    ROW_ARGS = ("x", "add")
    rows: int
    n: int
    k: int
    batch: int = 1
    type: int = FLOAT32  # of x, and of y unless y_type is given
    y_type: int | None = None
    source_type: int | None = None  # of the weights as the bundle has them
    max_rows: int = 17
    x_gap: int = 0  # elements between the slices of a row
    x_offset: int = 0
    y_gap: int = 0
    y_offset: int = 0  # not of add
    add: str | None = None  # None, "given", or "in_place": the same memory as y

    def __post_init__(self):
        object.__setattr__(self, "y_type", self.type if self.y_type is None else self.y_type)
        object.__setattr__(self, "source_type", self.type if self.source_type is None else self.source_type)

    def call(self) -> Call:
        rng = self.rng()
        x_width, y_width = self.k + self.x_gap, self.n + self.y_gap
        x = store(rng.standard_normal((self.rows, self.batch, x_width)), self.type)
        w = store(rng.standard_normal((self.batch, self.n, self.k)) / np.sqrt(self.k), self.source_type)
        y = Output((self.max_rows, self.batch, y_width), dtype_of(self.y_type))
        add = None
        if self.add:
            add = padded(store(rng.standard_normal((self.rows, self.batch, y_width)), self.y_type), self.max_rows)
        return Call(
            dict(
                max_rows=self.max_rows,
                n=self.n,
                k=self.k,
                batch=self.batch,
                x_row_stride=self.batch * x_width,
                x_batch_stride=x_width,
                y_row_stride=self.batch * y_width,
                y_batch_stride=y_width,
                x_type=self.type,
                y_type=self.y_type,
                w_type=BFLOAT16 if self.type == BFLOAT16 else self.source_type,
            ),
            dict(
                n_rows=self.rows,
                x=View(padded(x, self.max_rows), self.x_offset),
                add=Alias("y") if self.add == "in_place" else add,
                y=add if self.add == "in_place" else View(y, self.y_offset),
            ),
            dict(w=w, type=self.source_type),
        )

    def with_rows(self, call, rows, max_rows):
        if self.add == "in_place":
            raise NotImplementedError("row invariance in place")
        return super().with_rows(call, rows, max_rows)

    def expected(self, call, outputs):
        x = load(call.args["x"].base[: self.rows, :, self.x_offset :][..., : self.k]).swapaxes(0, 1)
        w = load(call.weights["w"])
        if self.type == BFLOAT16:
            w = bf16(w)
        added = call.args["y"] if self.add == "in_place" else call.args["add"]
        add = None if added is None else load(added[: self.rows, :, : self.n]).swapaxes(0, 1)
        exact = ops.gemm(x.astype(np.float64), w.astype(np.float64), None if add is None else add.astype(np.float64))
        single = ops.gemm(x, w)
        if self.y_type == BFLOAT16:  # plain code rounds the product, then the sum
            budget = bfloat16_budget(exact, bf16(single) if add is None else bf16(add + bf16(single)))
        elif self.type == BFLOAT16:
            budget = accumulation_budget(exact, self.k)
        else:
            budget = float32_budget(exact, single if add is None else add + single)
        shape = outputs["y"].shape
        b, r, c = np.ogrid[: self.batch, : self.rows, : self.n]
        y, written = place(shape, np.float64, (r * self.batch + b) * shape[2] + self.y_offset + c, exact)
        near = Near(y, budget, written, before=added if self.add == "in_place" else None)
        return rounded_once(near, self.k) if self.y_type == BFLOAT16 else {"y": near}


CASES = [
    GemmCase(name="square", risk="rows past n keep their bytes", rows=9, n=128, k=128, invariance=True),
    GemmCase(name="parallel", risk="work split over threads", rows=17, n=400, k=192, add="given", invariance=True),
    GemmCase(name="odd", risk="n and k are no multiples of anything", rows=9, n=13, k=37, invariance=True),
    GemmCase(name="one_output", risk="n and k below every tile", rows=3, n=1, k=1),
    GemmCase(name="one_row", risk="autoregressive decoding", rows=1, n=464, k=128, max_rows=1),
    GemmCase(name="kv_a", risk="n = 576 is 4.5 tiles of 128", rows=2, n=576, k=1024),
    GemmCase(name="shard", risk="n = 232: a shard that is no multiple of 16", rows=7, n=232, k=96),
    GemmCase(name="long", risk="long sum", rows=2, n=24, k=7168),
    GemmCase(name="many_rows", risk="more rows than one tile takes", rows=130, n=48, k=64, max_rows=130),
    GemmCase(
        name="heads",
        risk="batch, and x and y are slices of wider rows with different strides",
        rows=9,
        n=32,
        k=48,
        batch=6,
        x_gap=16,
        y_gap=8,
        invariance=True,
    ),
    GemmCase(
        name="odd_offset",
        risk="x and y start at odd elements",
        rows=7,
        n=33,
        k=65,
        x_gap=6,
        x_offset=5,
        y_gap=3,
        y_offset=1,
    ),
    GemmCase(name="in_place", risk="the residual is y itself", rows=9, n=128, k=64, add="in_place"),
    GemmCase(
        name="bf16_source",
        risk="bf16 weights under float32 activations",
        rows=9,
        n=96,
        k=64,
        source_type=BFLOAT16,
    ),
    GemmCase(name="bf16", risk="one rounding, after the sum", rows=9, n=96, k=128, type=BFLOAT16, invariance=True),
    GemmCase(
        name="bf16_add",
        risk="the sum with add is rounded once",
        rows=9,
        n=72,
        k=160,
        type=BFLOAT16,
        add="given",
        invariance=True,
    ),
    GemmCase(
        name="bf16_in_place",
        risk="the residual is y itself",
        rows=5,
        n=40,
        k=64,
        type=BFLOAT16,
        add="in_place",
    ),
    GemmCase(
        name="bf16_splits",
        risk="inputs split over blocks: partial sums, the last split and its last half unit; 92 rows in company",
        rows=92,
        max_rows=93,
        n=200,
        k=1376,
        type=BFLOAT16,
        add="given",
        invariance=True,
    ),
    GemmCase(
        name="bf16_most_splits",
        risk="most splits, the last of half a unit; outputs and their stride no multiple of 4; one row past a class",
        rows=17,
        n=203,
        k=2272,
        y_gap=2,
        type=BFLOAT16,
        add="given",
        invariance=True,
    ),
    GemmCase(
        name="bf16_two_classes",
        risk="blocks of 64 and 16 rows after each other in the same shared memory, without splits between them",
        rows=80,
        max_rows=80,
        n=400,
        k=448,
        type=BFLOAT16,
        invariance=True,
    ),
    GemmCase(name="bf16_33_rows", risk="one row past a class", rows=33, max_rows=33, n=40, k=224, type=BFLOAT16),
    GemmCase(
        name="bf16_odd_rows",
        risk="rows of x at odd addresses cannot be copied in pieces of 16 bytes",
        rows=3,
        n=24,
        k=96,
        x_gap=3,
        x_offset=1,
        y_gap=5,
        y_offset=3,
        type=BFLOAT16,
    ),
    GemmCase(
        name="bf16_rounded_weights",
        risk="float32 weights are rounded to bf16 when they are packed",
        rows=5,
        n=48,
        k=96,
        type=BFLOAT16,
        source_type=FLOAT32,
    ),
    GemmCase(
        name="router",
        risk="bf16 inputs, logits in float32: no rounding at all",
        rows=9,
        n=384,
        k=256,
        type=BFLOAT16,
        y_type=FLOAT32,
        invariance=True,
    ),
    GemmCase(
        name="bf16_heads",
        risk="2-byte slices at odd addresses",
        rows=7,
        n=21,
        k=35,
        batch=3,
        x_gap=6,
        x_offset=3,
        y_gap=4,
        type=BFLOAT16,
    ),
]
