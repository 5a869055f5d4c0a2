"""Named calls of w4a16_moe_experts, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import BFLOAT16, FLOAT32, Refusal, load, store
from engine.ops.moe_experts.cases import ExpertsCase
from engine.ops.w4a16_gemm.cases import int4_weights
from reference import ops


@dataclass(frozen=True, kw_only=True)
class W4a16MoeExpertsCase(ExpertsCase):
    group: int = 32
    scale_type: int = FLOAT32
    scales: str = "ordinary"
    different: int | None = None  # so many different experts, repeated: quick to make; None: all differ

    def matrix(self, rng, n, k, first=0):
        """Codes and scales."""
        if not self.units:
            return int4_weights(rng, (n, k), self.group, self.scale_type, self.scales)
        codes = 8 + np.eye(n, k, first, np.uint32).reshape(n, -1, 8)
        words = (codes << 4 * np.arange(8, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
        return words.view(np.int32), store(np.ones((n, k // self.group)), self.scale_type)

    def weights(self, rng):
        h, i = self.hidden, self.intermediate
        experts = []
        for e in range(self.n_experts):
            if self.different and e >= self.different:
                experts.append(dict(experts[e % self.different], expert=e))
                continue
            gate, up, down = (self.matrix(rng, *shape) for shape in ((i, h), (i, h, i), (h, i)))
            experts.append(
                dict(
                    expert=e,
                    gate_qw=gate[0],
                    gate_sc=gate[1],
                    up_qw=up[0],
                    up_sc=up[1],
                    down_qw=down[0],
                    down_sc=down[1],
                )
            )
        return experts

    def matrices(self, weights):
        def stack(name):
            return np.stack([w[name] for w in weights])

        return tuple(
            ops.dequantize(stack(f"{m}_qw"), load(stack(f"{m}_sc")), self.group) for m in ("gate", "up", "down")
        )

    def shape(self):
        return dict(
            max_rows=self.max_rows,
            hidden=self.hidden,
            intermediate=self.intermediate,
            n_experts=self.n_experts,
            top_k=self.top_k,
            group=self.group,
            type=self.type,
            scale_type=self.scale_type,
        )


_SHAPE = W4a16MoeExpertsCase(name="", risk="").shape()
_BF16 = dict(type=BFLOAT16, scale_type=BFLOAT16)

CASES = [
    W4a16MoeExpertsCase(name="g32", risk="experts without rows; rows past n have no experts", invariance=True),
    W4a16MoeExpertsCase(
        name="g64", risk="one scale for 64 inputs", hidden=128, intermediate=64, group=64, invariance=True
    ),
    W4a16MoeExpertsCase(name="g128", risk="one scale for 128 inputs", hidden=128, intermediate=256, group=128),
    W4a16MoeExpertsCase(
        name="parallel",
        risk="work split over threads",
        rows=17,
        hidden=192,
        intermediate=96,
        n_experts=6,
        invariance=True,
    ),
    W4a16MoeExpertsCase(name="one_row", risk="autoregressive decoding", rows=1, max_rows=1),
    W4a16MoeExpertsCase(name="one_set", risk="all rows on one expert's tile", rows=17, one_set=True, invariance=True),
    W4a16MoeExpertsCase(name="k2_count", risk="384 experts", n_experts=384, top_k=8, hidden=32),
    W4a16MoeExpertsCase(name="odd_tiles", risk="widths of 3 and 5 groups", hidden=160, intermediate=96),
    W4a16MoeExpertsCase(name="alone", risk="null shared and residual", shared=False, residual=None),
    W4a16MoeExpertsCase(name="in_place", risk="the residual is y itself", residual="in_place"),
    W4a16MoeExpertsCase(name="zero_weight", risk="a weight of the wrong slot", zero_weight=True, top_k=3),
    W4a16MoeExpertsCase(name="three_decades", risk="one scale for a whole tile", hidden=128, scales="three_decades"),
    W4a16MoeExpertsCase(name="signed_scales", risk="negative and zero scales", scales="signed"),
    W4a16MoeExpertsCase(name="bf16_scales", risk="bf16 scales under float32", scale_type=BFLOAT16),
    W4a16MoeExpertsCase(
        name="bf16_49_rows",
        risk="49 rows of an expert: blocks of 32 and 17 rows",
        rows=49,
        max_rows=49,
        hidden=96,
        intermediate=96,
        n_experts=3,
        one_set=True,
        **_BF16,
    ),
    W4a16MoeExpertsCase(
        name="bf16", risk="sum over slots in fp32, one rounding", top_k=4, hidden=96, invariance=True, **_BF16
    ),
    W4a16MoeExpertsCase(
        name="bf16_units",
        risk="silu(gate) · up is rounded to bf16",
        units=True,
        rows=2,
        top_k=1,
        residual=None,
        **_BF16,
    ),
    W4a16MoeExpertsCase(
        name="bf16_cancelling",
        risk="the order of slots by the number of rows",
        top_k=4,
        cancelling=True,
        invariance=True,
        **_BF16,
    ),
    W4a16MoeExpertsCase(name="bf16_in_place", risk="the residual is y itself", residual="in_place", **_BF16),
    W4a16MoeExpertsCase(name="bf16_float32_scales", risk="float32 scales under bf16", type=BFLOAT16),
    W4a16MoeExpertsCase(name="bf16_k2_count", risk="384 experts", n_experts=384, top_k=8, hidden=32, **_BF16),
    W4a16MoeExpertsCase(
        name="bf16_stages",
        risk="widths of many stages and of a half unit at the end, tiles that are not full",
        hidden=544,
        intermediate=288,
        n_experts=3,
        invariance=True,
        **_BF16,
    ),
    W4a16MoeExpertsCase(
        name="bf16_company",
        risk="a row's bits change with the rows that share its expert: 1 to 7, 12, 32",
        rows=44,
        max_rows=45,
        hidden=320,
        intermediate=160,
        n_experts=5,
        top_k=3,
        one_set=True,
        invariance=True,
        **_BF16,
    ),
]

LARGE = [
    W4a16MoeExpertsCase(
        name="k2_layer",
        risk="a layer of K2, 1.1e10 weights: 32-bit offsets of high experts",
        rows=6,
        hidden=7168,
        intermediate=2048,
        n_experts=384,
        top_k=8,
        different=13,
        **_BF16,
    )
]

REFUSALS = [
    Refusal("group_16", dict(_SHAPE, group=16), "group"),
    Refusal("ragged_hidden", dict(_SHAPE, hidden=80), "hidden"),
    Refusal("ragged_intermediate", dict(_SHAPE, intermediate=40), "intermediate"),
]
