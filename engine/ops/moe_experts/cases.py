"""Named calls of moe_experts, each for the mistake it would show."""

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
    store,
)
from engine.operators import Alias, Call, Output
from reference import ops


@dataclass(frozen=True, kw_only=True)
class ExpertsCase(RowwiseCase):
    """What moe_experts and w4a16_moe_experts share: all but the weights."""

    ROW_ARGS = ("x", "experts", "weights", "shared", "residual")
    rows: int = 9
    hidden: int = 64
    intermediate: int = 32
    n_experts: int = 8
    top_k: int = 2
    type: int = FLOAT32
    max_rows: int = 17
    one_set: bool = False  # all rows on the same experts
    shared: bool = True
    residual: str | None = "given"  # None, "given", or "in_place": the same memory as y
    zero_weight: bool = False  # some slots weigh 0
    units: bool = False  # bf16: matrices of ones and zeros, and a shared part that cancels what was rounded
    cancelling: bool = False  # slots 0 and 2 cancel, and what they leave of slot 1 shows their order, in bf16 too

    def weights(self, rng) -> list[dict]:
        """One <Op>Weights an expert."""
        raise NotImplementedError

    def matrices(self, weights: list[dict]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float32 gate, up [E, I, H] and down [E, H, I] of these experts, as the operator uses them."""
        raise NotImplementedError

    def shape(self) -> dict:
        raise NotImplementedError

    def rounded_units(self, x: np.ndarray) -> np.ndarray:
        """What `units` leaves of the layer: silu(x) of the first columns times the next ones, rounded to bf16, then
        zeros. [rows, hidden]"""
        gate, up = x[:, : self.intermediate], x[:, self.intermediate : 2 * self.intermediate]
        made = np.zeros_like(x)
        made[:, : self.intermediate] = bf16(ops.silu(gate) * up)
        return made

    def call(self) -> Call:
        rng = self.rng()
        experts = np.stack([rng.permutation(self.n_experts)[: self.top_k] for _ in range(self.rows)]).astype(np.int32)
        if self.one_set:
            experts[:] = experts[0]
        weights = rng.uniform(0.1, 1.5, experts.shape).astype(np.float32)
        if self.zero_weight:
            weights[::2, 0] = 0
        if self.cancelling:
            experts[:, 2], weights[:, 0] = experts[:, 0], 3e5
            weights[:, 2] = -weights[:, 0]

        def rows():
            return padded(store(rng.standard_normal((self.rows, self.hidden)), self.type), self.max_rows)

        x, residual, y = rows(), rows(), Output((self.max_rows, self.hidden), dtype_of(self.type))
        shared = rows() if self.shared else None
        if self.units:
            weights[:] = 1
            shared = padded(store(-self.rounded_units(load(x[: self.rows])), self.type), self.max_rows)
        return Call(
            self.shape(),
            dict(
                n_rows=self.rows,
                x=x,
                experts=padded(experts, self.max_rows),
                weights=padded(weights, self.max_rows),
                shared=shared,
                residual={None: None, "given": residual, "in_place": Alias("y")}[self.residual],
                y=residual if self.residual == "in_place" else y,
            ),
            self.weights(rng),
        )

    def expected(self, call, outputs):
        def rows(name):
            return None if call.args[name] is None else load(call.args[name][: self.rows])

        def wide(x):
            return None if x is None else x.astype(np.float64)

        if self.units:
            size = self.rows * self.hidden
            y, written = place(outputs["y"].shape, np.float64, np.arange(size), np.zeros(size))
            return {"y": Near(y, 0.0, written)}
        in_place = self.residual == "in_place"
        x, shared, residual = rows("x"), rows("shared"), rows("y" if in_place else "residual")
        experts, weights = call.args["experts"][: self.rows], call.args["weights"][: self.rows]
        used, experts = np.unique(experts, return_inverse=True)
        experts = experts.reshape(weights.shape)
        matrices = self.matrices([call.weights[e] for e in used])
        exact = ops.moe_experts(
            wide(x), experts, wide(weights), *(wide(m) for m in matrices), wide(shared), wide(residual)
        )
        if self.type == FLOAT32:
            budget = float32_budget(exact, ops.moe_experts(x, experts, weights, *matrices, shared, residual))
        else:
            plain = _plain(x, experts, weights, *map(bf16, matrices), shared, residual)
            budget = bfloat16_budget(exact, plain)
        y, written = place(outputs["y"].shape, np.float64, np.arange(exact.size), exact.reshape(-1))
        return {"y": Near(y, budget, written, before=call.args["y"] if in_place else None)}


def _plain(x, experts, weights, gate, up, down, shared, residual):
    """Eager bf16 code: every product, the activation, each weighted slot and each partial sum is rounded."""
    y = np.zeros_like(x)
    for row in range(len(x)):
        for slot, e in enumerate(experts[row]):
            g, u = (bf16(ops.gemm(x[row : row + 1], w[e])) for w in (gate, up))
            hidden = bf16(bf16(ops.silu(g)) * u)
            y[row] = bf16(y[row] + bf16(bf16(ops.gemm(hidden, down[e]))[0] * bf16(weights[row, slot])))
    if shared is not None:
        y = bf16(y + shared)
    return y if residual is None else bf16(residual + y)


@dataclass(frozen=True, kw_only=True)
class MoeExpertsCase(ExpertsCase):
    source_type: int | None = None  # of the weights as the bundle has them; None: type

    def __post_init__(self):
        object.__setattr__(self, "source_type", self.type if self.source_type is None else self.source_type)

    def weights(self, rng):
        def matrix(n, k, first=0):
            x = np.eye(n, k, first) if self.units else rng.standard_normal((n, k)) / np.sqrt(k)
            return store(x, self.source_type)

        h, i = self.hidden, self.intermediate
        return [
            dict(expert=e, type=self.source_type, gate=matrix(i, h), up=matrix(i, h, i), down=matrix(h, i))
            for e in range(self.n_experts)
        ]

    def matrices(self, weights):
        matrices = tuple(load(np.stack([w[name] for w in weights])) for name in ("gate", "up", "down"))
        return tuple(map(bf16, matrices)) if self.type == BFLOAT16 else matrices

    def shape(self):
        return dict(
            max_rows=self.max_rows,
            hidden=self.hidden,
            intermediate=self.intermediate,
            n_experts=self.n_experts,
            top_k=self.top_k,
            type=self.type,
            w_type=BFLOAT16 if self.type == BFLOAT16 else self.source_type,
        )


CASES = [
    MoeExpertsCase(name="plain", risk="experts without rows; rows past n have no experts", invariance=True),
    MoeExpertsCase(
        name="parallel",
        risk="work split over threads",
        rows=17,
        hidden=192,
        intermediate=96,
        n_experts=6,
        invariance=True,
    ),
    MoeExpertsCase(name="one_row", risk="autoregressive decoding", rows=1, max_rows=1),
    MoeExpertsCase(name="one_set", risk="all rows on one expert's tile", rows=17, one_set=True, invariance=True),
    MoeExpertsCase(name="k2_count", risk="384 experts", n_experts=384, top_k=8, hidden=32, intermediate=16),
    MoeExpertsCase(name="every_expert", risk="top-k takes all", n_experts=5, top_k=5),
    MoeExpertsCase(
        name="odd",
        risk="widths that are no multiple of anything",
        hidden=37,
        intermediate=19,
        invariance=True,
    ),
    MoeExpertsCase(name="alone", risk="null shared and residual", shared=False, residual=None),
    MoeExpertsCase(name="no_shared", risk="null shared", shared=False),
    MoeExpertsCase(name="in_place", risk="the residual is y itself", residual="in_place"),
    MoeExpertsCase(name="zero_weight", risk="a weight of the wrong slot", zero_weight=True, top_k=3),
    MoeExpertsCase(name="bf16_source", risk="bf16 weights under float32 activations", source_type=BFLOAT16),
    MoeExpertsCase(
        name="bf16_stages",
        risk="more stages than the ring has; 49 rows of an expert: blocks of two classes, one row past a class",
        rows=49,
        max_rows=49,
        hidden=544,
        intermediate=288,
        n_experts=3,
        top_k=2,
        one_set=True,
        type=BFLOAT16,
        invariance=True,
    ),
    MoeExpertsCase(
        name="bf16",
        risk="sum over slots in fp32, one rounding",
        type=BFLOAT16,
        top_k=4,
        hidden=96,
        invariance=True,
    ),
    MoeExpertsCase(
        name="bf16_units",
        risk="silu(gate) · up is rounded to bf16",
        type=BFLOAT16,
        units=True,
        rows=2,
        top_k=1,
        residual=None,
    ),
    MoeExpertsCase(
        name="bf16_cancelling",
        risk="the order of slots by the number of rows",
        type=BFLOAT16,
        top_k=4,
        cancelling=True,
        invariance=True,
    ),
    MoeExpertsCase(name="bf16_in_place", risk="the residual is y itself", type=BFLOAT16, residual="in_place"),
    MoeExpertsCase(
        name="bf16_rounded_weights",
        risk="float32 weights rounded at load",
        type=BFLOAT16,
        source_type=FLOAT32,
    ),
]
