"""tree_build against its numpy twin: engine/ops/tree_build/cases.py names the cases and their risks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.tree_build.cases import TreeBuildCase

from .harness import operator_tests

test_case, test_row_invariance, test_refusal = operator_tests("tree_build")


def logits_of(levels, vocab):
    """Few distinct values, so that much ties, and what must never be pushed."""
    values = st.sampled_from([0.0, 1.0, 1.5, 3.0, -4.0, 30.0, -np.inf, np.nan])
    return st.lists(values, min_size=levels * vocab, max_size=levels * vocab)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(2, 6), st.integers(0, 24))
def test_any_logits(library, data, levels, vocab, budget):
    case = TreeBuildCase(name="any", risk="", levels=levels, vocab=vocab, budget=budget)
    call = case.call()
    call.args["logits"] = np.array(data.draw(logits_of(levels, vocab)), np.float32).reshape(levels, vocab)
    outputs = library.operator("tree_build").run(call)
    errors = {key: want.error(outputs[key]) <= want.budget for key, want in case.expected(call, outputs).items()}
    assert all(errors.values()), errors


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30))
def test_a_larger_budget_only_adds_nodes(library, seed, budget):
    """The nodes of a budget are the first nodes of every larger one: pop order."""
    rows = []
    for larger in (0, 1):
        case = TreeBuildCase(name=f"nested_{seed}", risk="", levels=4, vocab=40, budget=budget + larger)
        outputs = library.operator("tree_build").run(case.call())
        rows.append([outputs[name][: budget + 1].tolist() for name in ("tokens", "parents", "depths")])
    assert rows[0] == rows[1]
