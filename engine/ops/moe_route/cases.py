"""Named calls of moe_route, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import Exact, Near, Refusal, RowwiseCase, float32_budget, padded, place
from engine.operators import Call, Output
from reference import ops


@dataclass(frozen=True, kw_only=True)
class MoeRouteCase(RowwiseCase):
    ROW_ARGS = ("logits",)
    rows: int = 9
    n_experts: int = 8
    top_k: int = 2
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    scaling: float = 2.827
    max_rows: int = 17
    levels: int | None = None  # so many distinct logits, so that choices tie exactly; the bias is 0 then
    logits: float = 2.0  # their standard deviation
    bias_mean: float = 0.0
    impossible: int = 0  # so many experts, the first ones, have a bias of -inf
    ties_only_in_float32: bool = False  # sigmoids that differ in float64 are equal in float32

    def call(self) -> Call:
        rng = self.rng()
        logits = rng.standard_normal((self.rows, self.n_experts)) * self.logits
        bias = self.bias_mean + 0.2 * rng.standard_normal(self.n_experts)
        if self.levels:
            logits = rng.integers(0, self.levels, logits.shape) - self.levels / 2
            bias[:] = self.bias_mean
        bias[: self.impossible] = -np.inf
        if self.ties_only_in_float32:
            logits, bias = rng.uniform(20, 60, logits.shape), 0 * bias
        return Call(
            dict(
                max_rows=self.max_rows,
                n_experts=self.n_experts,
                top_k=self.top_k,
                n_group=self.n_group,
                topk_group=self.topk_group,
                norm_topk_prob=int(self.norm_topk_prob),
                scaling=self.scaling,
            ),
            dict(
                n_rows=self.rows,
                logits=padded(logits.astype(np.float32), self.max_rows),
                bias=bias.astype(np.float32),
                experts=Output((self.max_rows, self.top_k), np.int32),
                weights=Output((self.max_rows, self.top_k)),
            ),
        )

    def expected(self, call, outputs):
        logits, bias = call.args["logits"][: self.rows], call.args["bias"]
        rule = (self.top_k, self.n_group, self.topk_group, self.norm_topk_prob, self.scaling)
        experts, single = ops.moe_route(logits, bias, *rule)
        wide_experts, exact = ops.moe_route(logits.astype(np.float64), bias.astype(np.float64), *rule)
        if not self.ties_only_in_float32 and (experts != wide_experts).any():
            raise ValueError(f"{self.name}: a choice so close that float32 decides it: take another seed")
        index = np.arange(experts.size)
        chosen = place(outputs["experts"].shape, np.int32, index, experts.reshape(-1))
        weights, written = place(outputs["weights"].shape, np.float64, index, exact.reshape(-1))
        return {"experts": Exact(*chosen), "weights": Near(weights, float32_budget(exact, single), written)}


_SHAPE = MoeRouteCase(name="", risk="").call().shape

CASES = [
    MoeRouteCase(name="plain", risk="bias selects only; router order; rows past n keep their bytes", invariance=True),
    MoeRouteCase(name="k2", risk="384 experts, not a power of two", n_experts=384, top_k=8, invariance=True),
    MoeRouteCase(name="odd", risk="tail of a vector", n_experts=37, top_k=5, invariance=True),
    MoeRouteCase(name="ties", risk="equal choices: the lower expert", n_experts=40, top_k=8, levels=4),
    MoeRouteCase(name="all_equal", risk="equal choices: the lower expert", n_experts=20, top_k=6, levels=1),
    MoeRouteCase(name="one_expert", risk="top-1 of one", n_experts=1, top_k=1),
    MoeRouteCase(name="every_expert", risk="top-k takes all", n_experts=6, top_k=6),
    MoeRouteCase(
        name="groups",
        risk="group score is the sum of its two best",
        n_experts=64,
        top_k=6,
        n_group=8,
        topk_group=3,
    ),
    MoeRouteCase(
        name="tied_groups",
        risk="equal groups: the lower one",
        n_experts=32,
        top_k=4,
        n_group=8,
        topk_group=2,
        levels=2,
    ),
    MoeRouteCase(
        name="groups_of_one", risk="a group has no second best", n_experts=8, top_k=3, n_group=8, topk_group=4
    ),
    MoeRouteCase(
        name="negative_choices",
        risk="a dropped group counts as 0, above a kept negative choice",
        n_experts=32,
        top_k=4,
        n_group=4,
        topk_group=2,
        bias_mean=-3.0,
    ),
    MoeRouteCase(name="unnormalised", risk="norm_topk_prob off", n_experts=16, top_k=4, norm_topk_prob=False),
    MoeRouteCase(
        name="tiny_scores",
        risk="sigmoids near 1e-20 against the 1e-20 of the norm",
        logits=0.5,
        n_experts=16,
        top_k=4,
    ),
    MoeRouteCase(
        name="saturated",
        risk="sigmoid in fp32: all 1, the lower expert",
        n_experts=24,
        top_k=4,
        ties_only_in_float32=True,
    ),
    MoeRouteCase(
        name="impossible_experts",
        risk="choices of -inf are the last, not none: an index past the experts",
        n_experts=12,
        top_k=5,
        impossible=9,
    ),
    MoeRouteCase(name="one_row", risk="autoregressive decoding", rows=1, n_experts=8, top_k=2, max_rows=1),
]

REFUSALS = [
    Refusal("ragged_groups", dict(_SHAPE, n_group=3), "n_group"),
    Refusal("too_many_groups", dict(_SHAPE, topk_group=2), "topk_group"),
    Refusal("too_many_experts", dict(_SHAPE, n_group=4, topk_group=1, top_k=3), "top_k"),
]
