"""Named calls of w4a16_gemm, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import (
    BFLOAT16,
    FLOAT32,
    Near,
    Refusal,
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


def int4_weights(rng, shape, group, scale_type, scales="ordinary"):
    """Random (qw int32 [..., out, in/8], sc [..., out, in/group] of scale_type); all 16 codes occur.

    scales: "ordinary" about 1/sqrt(in); "three_decades" per group; "tiny" 1e-6; "signed" also negative and zero.
    """
    *batch, n, k = shape
    qw = rng.integers(0, 2**32, (*batch, n, k // 8), np.uint32).view(np.int32)
    sc = rng.uniform(0.5, 1.5, (*batch, n, k // group)) / (4.6 * np.sqrt(k))
    if scales == "three_decades":
        sc *= 10.0 ** rng.uniform(-3, 0, sc.shape)
    elif scales == "tiny":
        sc = np.full_like(sc, 1e-6)
    elif scales == "signed":
        sc *= rng.choice([-1.0, 0.0, 1.0], sc.shape)
    elif scales != "ordinary":
        raise ValueError(scales)
    return qw, store(sc, scale_type)


@dataclass(frozen=True, kw_only=True)
class W4a16GemmCase(RowwiseCase):
    ROW_ARGS = ("x", "add")
    rows: int
    n: int
    k: int
    group: int = 32
    type: int = FLOAT32
    y_type: int | None = None
    scale_type: int = FLOAT32
    scales: str = "ordinary"
    code: int | None = None  # the same code everywhere; None: all codes
    max_rows: int = 17
    x_gap: int = 0  # elements
    x_offset: int = 0
    y_gap: int = 0
    y_offset: int = 0  # not of add
    add: str | None = None  # None, "given", or "in_place": the same memory as y

    def __post_init__(self):
        object.__setattr__(self, "y_type", self.type if self.y_type is None else self.y_type)

    def call(self) -> Call:
        rng = self.rng()
        x_width, y_width = self.k + self.x_gap, self.n + self.y_gap
        qw, sc = int4_weights(rng, (self.n, self.k), self.group, self.scale_type, self.scales)
        if self.code is not None:
            qw = np.full_like(qw, np.uint32(0x11111111 * self.code).view(np.int32))
        x = store(rng.standard_normal((self.rows, x_width)), self.type)
        add = None
        if self.add:
            add = padded(store(rng.standard_normal((self.rows, y_width)), self.y_type), self.max_rows)
        y = Output((self.max_rows, y_width), dtype_of(self.y_type))
        return Call(
            dict(
                max_rows=self.max_rows,
                n=self.n,
                k=self.k,
                group=self.group,
                x_row_stride=x_width,
                y_row_stride=y_width,
                x_type=self.type,
                y_type=self.y_type,
                scale_type=self.scale_type,
            ),
            dict(
                n_rows=self.rows,
                x=View(padded(x, self.max_rows), self.x_offset),
                add=Alias("y") if self.add == "in_place" else add,
                y=add if self.add == "in_place" else View(y, self.y_offset),
            ),
            dict(qw=qw, sc=sc),
        )

    def expected(self, call, outputs):
        x = load(call.args["x"].base[: self.rows, self.x_offset : self.x_offset + self.k])
        qw, sc = call.weights["qw"], load(call.weights["sc"])
        added = call.args["y"] if self.add == "in_place" else call.args["add"]
        add = None if added is None else load(added[: self.rows, : self.n])
        wide = None if add is None else add.astype(np.float64)
        exact = ops.w4a16_gemm(x.astype(np.float64), qw, sc.astype(np.float64), self.group, wide)
        if self.y_type == BFLOAT16:  # plain code dequantises to bf16, rounds the product, then the sum
            plain = bf16(ops.gemm(x, bf16(ops.dequantize(qw, sc, self.group))))
            budget = bfloat16_budget(exact, plain if add is None else bf16(add + plain))
        elif self.type == BFLOAT16:
            budget = accumulation_budget(exact, self.k)
        else:
            budget = float32_budget(exact, ops.w4a16_gemm(x, qw, sc, self.group, add))
        shape = outputs["y"].shape
        r, c = np.ogrid[: self.rows, : self.n]
        y, written = place(shape, np.float64, r * shape[1] + self.y_offset + c, exact)
        near = Near(y, budget, written, before=added if self.add == "in_place" else None)
        return rounded_once(near, self.k) if self.y_type == BFLOAT16 else {"y": near}


_SHAPE = W4a16GemmCase(name="", risk="", rows=1, n=16, k=64).call().shape
_BF16 = dict(type=BFLOAT16, scale_type=BFLOAT16)

CASES = [
    W4a16GemmCase(name="g32", risk="rows past n keep their bytes", rows=9, n=128, k=128, invariance=True),
    W4a16GemmCase(name="g64", risk="one scale for 64 inputs", rows=9, n=64, k=192, group=64, invariance=True),
    W4a16GemmCase(name="g128", risk="one scale for 128 inputs", rows=9, n=64, k=384, group=128, invariance=True),
    W4a16GemmCase(name="one_row_g32", risk="its own path for one row", rows=1, n=96, k=160, max_rows=1),
    W4a16GemmCase(name="one_row_g64", risk="a*(T/g) for (a*T)/g", rows=1, n=96, k=320, group=64, max_rows=1),
    W4a16GemmCase(name="one_row_g128", risk="a*(T/g) for (a*T)/g", rows=1, n=96, k=640, group=128, max_rows=1),
    W4a16GemmCase(name="parallel", risk="work split over threads", rows=17, n=400, k=192, invariance=True),
    W4a16GemmCase(name="kv_a", risk="n = 576 is 4.5 tiles of 128", rows=2, n=576, k=512),
    W4a16GemmCase(name="shard_464", risk="n is no multiple of 32", rows=7, n=464, k=96),
    W4a16GemmCase(name="shard_232", risk="n is no multiple of 16", rows=7, n=232, k=32),
    W4a16GemmCase(name="odd_n", risk="n is no multiple of 8", rows=7, n=13, k=64),
    W4a16GemmCase(name="one_output", risk="n below every tile", rows=2, n=1, k=32),
    W4a16GemmCase(name="odd_groups", risk="k/group is odd: k no multiple of a tile", rows=5, n=40, k=1344),
    W4a16GemmCase(name="long", risk="K = 10944, refused by kernels that could run it", rows=2, n=24, k=10944),
    W4a16GemmCase(name="many_rows", risk="more rows than one tile takes", rows=130, n=48, k=64, max_rows=130),
    W4a16GemmCase(
        name="three_decades",
        risk="one scale taken for a whole tile",
        rows=9,
        n=64,
        k=256,
        scales="three_decades",
    ),
    W4a16GemmCase(name="tiny_scales", risk="small scales flushed to 0", rows=5, n=48, k=128, scales="tiny"),
    W4a16GemmCase(name="signed_scales", risk="negative and zero scales", rows=5, n=48, k=128, scales="signed"),
    W4a16GemmCase(name="code_0", risk="code 0 is -8, not 0", rows=3, n=16, k=64, code=0),
    W4a16GemmCase(name="code_8", risk="code 8 is exactly 0", rows=3, n=16, k=64, code=8),
    W4a16GemmCase(name="code_15", risk="code 15 is 7: the sign of the top nibble", rows=3, n=16, k=64, code=15),
    W4a16GemmCase(
        name="strided",
        risk="different row strides of x and y, x at an odd element",
        rows=9,
        n=40,
        k=96,
        x_gap=11,
        x_offset=5,
        y_gap=3,
        invariance=True,
    ),
    W4a16GemmCase(name="add", risk="the residual is added once", rows=9, n=72, k=128, add="given", invariance=True),
    W4a16GemmCase(name="in_place", risk="the residual is y itself", rows=9, n=64, k=64, add="in_place"),
    W4a16GemmCase(name="bf16_scales", risk="bf16 scales under float32", rows=9, n=64, k=96, scale_type=BFLOAT16),
    W4a16GemmCase(
        name="bf16",
        risk="the scale is applied in fp32, one rounding at the end",
        rows=9,
        n=96,
        k=256,
        **_BF16,
        invariance=True,
    ),
    W4a16GemmCase(
        name="bf16_float32_scales",
        risk="float32 scales under bf16",
        rows=9,
        n=40,
        k=128,
        group=64,
        type=BFLOAT16,
    ),
    W4a16GemmCase(
        name="bf16_tiny_scales",
        risk="a scale trick that needs normal bf16 products",
        rows=5,
        n=48,
        k=128,
        **_BF16,
        scales="tiny",
    ),
    W4a16GemmCase(
        name="bf16_three_decades",
        risk="one scale taken for a whole tile",
        rows=9,
        n=64,
        k=256,
        **_BF16,
        scales="three_decades",
        add="given",
        invariance=True,
    ),
    W4a16GemmCase(
        name="bf16_splits",
        risk="inputs split over blocks: partial sums, the last split and its last half unit; 92 rows in company",
        rows=92,
        max_rows=93,
        n=200,
        k=1376,
        **_BF16,
        add="given",
        invariance=True,
    ),
    W4a16GemmCase(
        name="bf16_three_classes",
        risk="blocks of 64, 64 and 21 rows after each other in the same shared memory, without splits between them",
        rows=149,
        max_rows=149,
        n=264,
        k=416,
        **_BF16,
    ),
    W4a16GemmCase(
        name="bf16_most_splits",
        risk="most splits, the last of half a unit; outputs and their stride no multiple of 4; one row past a class",
        rows=17,
        n=203,
        k=2272,
        y_gap=2,
        **_BF16,
        add="given",
        invariance=True,
    ),
    W4a16GemmCase(
        name="bf16_33_rows",
        risk="one row past a class",
        rows=33,
        max_rows=33,
        n=40,
        k=224,
        **_BF16,
    ),
    W4a16GemmCase(
        name="bf16_odd_outputs",
        risk="split sums stored by fours where the last four are not whole",
        rows=9,
        n=198,
        k=1376,
        y_gap=2,
        **_BF16,
        add="given",
    ),
    W4a16GemmCase(
        name="bf16_odd_y",
        risk="split sums stored by fours where y starts at an odd address",
        rows=9,
        n=200,
        k=1376,
        y_gap=4,
        y_offset=3,
        **_BF16,
        add="given",
    ),
    W4a16GemmCase(
        name="bf16_odd_rows",
        risk="rows of x at odd addresses cannot be copied in pieces of 16 bytes",
        rows=3,
        n=24,
        k=96,
        x_gap=3,
        x_offset=1,
        y_gap=5,
        **_BF16,
    ),
    W4a16GemmCase(
        name="bf16_logits",
        risk="fp32 output of bf16 inputs: no rounding at all",
        rows=9,
        n=120,
        k=192,
        type=BFLOAT16,
        y_type=FLOAT32,
        scale_type=BFLOAT16,
        invariance=True,
    ),
]

REFUSALS = [
    Refusal("group_16", dict(_SHAPE, group=16), "group"),
    Refusal("ragged_k", dict(_SHAPE, k=80), "k"),
]
