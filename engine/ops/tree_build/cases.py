"""Named calls of tree_build, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import EPS, Case, Exact, Near, Refusal, bf16
from engine.operators import Call, Output, decode_state, poisoned
from reference import ddtree

ROOT = 11  # the token that the last round left in tokens[0]


@dataclass(frozen=True, kw_only=True)
class TreeBuildCase(Case):
    """The tree must be exactly the twin's on the operator's own log-probs, and those near the twin's."""

    levels: int = 7
    vocab: int = 400
    budget: int = 16
    logits: str = "normal"
    special: tuple = ()  # (level, token, logit); token None: the whole level
    done: int = 0
    want_top: bool = True

    def _logits(self) -> np.ndarray:
        shape, rng = (self.levels, self.vocab), self.rng()
        x = {
            "normal": lambda: 3 * rng.standard_normal(shape),
            "bf16_grid": lambda: bf16(20 + 3 * rng.standard_normal(shape)),  # as a bf16 head gives them: 0.125 apart
            "uniform": lambda: np.zeros(shape),
            "few": lambda: rng.integers(0, 3, shape),
            "same_levels": lambda: np.broadcast_to(2 * rng.standard_normal(self.vocab), shape),
            "peaked": lambda: np.eye(self.vocab)[rng.integers(0, self.vocab, self.levels)] * 1000,
            "one_ulp": lambda: 8 + np.spacing(np.float32(8)) * rng.permutation(self.vocab) * np.ones(shape),
            "offset": lambda: 1e4 + rng.standard_normal(shape),
            # A kernel that looks at tokens in groups of so many apart finds all of the best in a few of them.
            "crowded": lambda: np.round(rng.standard_normal(shape), 1) + 10 * (np.arange(self.vocab) % 128 < 63),
            "crowded_equal": lambda: np.zeros(shape) + 10 * (np.arange(self.vocab) % 128 < 63),
        }[self.logits]()
        x = np.array(x, np.float32)
        for level, token, value in self.special:
            x[level, token if token is not None else slice(None)] = value
        return x

    def call(self) -> Call:
        top_k, rows = min(self.budget, self.vocab), self.budget + 1
        tokens = poisoned(rows, np.int32)
        tokens[0] = ROOT
        return Call(
            dict(levels=self.levels, vocab=self.vocab, budget=self.budget, top_k=top_k),
            dict(
                logits=self._logits(),
                state=decode_state(n_rows=1, prefix=5, done=self.done),
                tokens=tokens,
                parents=Output((rows,), np.int32),
                depths=Output((rows,), np.int32),
                top_tokens=Output((self.levels, top_k), np.int32) if self.want_top else None,
                top_log_probs=Output((self.levels, top_k), np.float32) if self.want_top else None,
            ),
        )

    def expected(self, call, outputs):
        state, tokens = call.args["state"].copy(), call.args["tokens"]
        top = ddtree.log_probs_top_k(call.args["logits"], call.shape["top_k"])
        if self.done:
            state["n_rows"] = 0
            untouched = {name: Exact(outputs[name], False) for name in outputs if name not in ("state", "tokens")}
            return {"state": Exact(state), "tokens": Exact(tokens), **untouched}
        own = (outputs["top_tokens"], outputs["top_log_probs"]) if self.want_top else top
        tree = ddtree.build_tree(*own, self.budget)
        n = len(tree.tokens)
        state["n_rows"] = n
        rows = np.arange(self.budget + 1)

        def column(values):
            return np.resize(values, len(rows)).astype(np.int32)

        result = {
            "state": Exact(state),
            "tokens": Exact(column(tree.tokens), (0 < rows) & (rows < n), before=tokens),
            "parents": Exact(column(tree.parents), rows < n),
            "depths": Exact(column(tree.depths), rows < n),
        }
        if self.want_top:
            top_tokens, log_probs = top
            judged = log_probs > -np.inf  # what is never pushed may stand in any order
            result["top_tokens"] = Exact(np.where(judged, top_tokens, outputs["top_tokens"]))
            largest = np.abs(log_probs[judged]).max(initial=0)
            budget = max(1e-6, EPS * float(largest))  # one ulp of a log-prob below -8
            result["top_log_probs"] = Near(log_probs.astype(np.float64), budget)
        return result


NAN, INF = np.nan, np.inf

CASES = [
    TreeBuildCase(name="normal", risk="scores, ranks and parents", budget=32),
    TreeBuildCase(name="only_tree", risk="null top_tokens and top_log_probs", want_top=False),
    TreeBuildCase(name="chain", risk="budget of one path", logits="peaked", budget=7),
    TreeBuildCase(
        name="certain",
        risk="log-prob 0: a prefix and its extension have one score",
        logits="peaked",
        budget=24,
    ),
    TreeBuildCase(
        name="bf16_grid",
        risk="ties by rank tuple, not by insertion; top-k ties by token",
        logits="bf16_grid",
        budget=64,
    ),
    TreeBuildCase(name="uniform", risk="everything ties", logits="uniform", vocab=20, budget=40),
    TreeBuildCase(name="uniform_wide", risk="ties among more rows than a warp", logits="uniform", vocab=40, budget=60),
    TreeBuildCase(name="few", risk="top-k cut inside a tie", logits="few", vocab=60, budget=16),
    TreeBuildCase(name="same_levels", risk="(0, 1) and (1, 0) tie", logits="same_levels", vocab=30, budget=64),
    TreeBuildCase(
        name="one_ulp",
        risk="ids follow the logits where log-probs round to equal",
        logits="one_ulp",
        vocab=64,
    ),
    TreeBuildCase(name="offset", risk="the maximum is not subtracted", logits="offset"),
    TreeBuildCase(name="full_tree", risk="budget larger than the full tree", levels=2, vocab=3, budget=40),
    TreeBuildCase(name="budget_0", risk="the root alone", budget=0),
    TreeBuildCase(name="budget_1", risk="one node", budget=1),
    TreeBuildCase(name="budget_256", risk="rank tuples of large ranks", budget=256, vocab=512),
    TreeBuildCase(name="one_level", risk="no children", levels=1, budget=12),
    TreeBuildCase(name="no_level", risk="block size 1", levels=0, budget=4),
    TreeBuildCase(name="deep", risk="block 16", levels=15, budget=48, vocab=33),
    TreeBuildCase(name="two_tokens", risk="the smallest vocabulary", vocab=2, budget=16),
    TreeBuildCase(name="vocabulary", risk="K2's vocabulary", levels=2, vocab=163840, budget=16),
    TreeBuildCase(
        name="crowded",
        risk="the best tokens in few groups, and ties among them",
        levels=2,
        vocab=163840,
        budget=64,
        logits="crowded",
    ),
    TreeBuildCase(
        name="crowded_equal",
        risk="more equal best tokens in few groups than can be ranked at once",
        levels=1,
        vocab=163840,
        budget=64,
        logits="crowded_equal",
    ),
    TreeBuildCase(name="token_0", risk="token id 0 taken for padding", vocab=9, special=((0, 0, 30), (1, 0, 30))),
    TreeBuildCase(
        name="minus_inf",
        risk="-inf is never pushed, though the budget has room",
        levels=2,
        vocab=4,
        budget=40,
        special=((0, 2, -INF), (0, 3, -INF), (1, 1, -INF)),
    ),
    TreeBuildCase(
        name="minus_inf_level",
        risk="a level without a distribution ends every path",
        special=((2, None, -INF),),
    ),
    TreeBuildCase(name="nan", risk="NaN is never pushed: its level ends every path", special=((3, 17, NAN),)),
    TreeBuildCase(name="nan_first_level", risk="NaN at the first level: the root alone", special=((0, 5, NAN),)),
    TreeBuildCase(name="plus_inf", risk="inf - inf", special=((1, 5, INF),)),
    TreeBuildCase(name="done", risk="a round after the end changes nothing", done=2),
]

_SHAPE = TreeBuildCase(name="", risk="").call().shape

REFUSALS = [
    Refusal("negative_levels", dict(_SHAPE, levels=-1), "levels"),
    Refusal("negative_budget", dict(_SHAPE, budget=-1, top_k=-1), "budget"),
    Refusal("other_top_k", dict(_SHAPE, top_k=3), "top_k"),
]
