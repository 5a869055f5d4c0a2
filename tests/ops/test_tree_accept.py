"""tree_accept against its numpy twin: engine/ops/tree_accept/cases.py names the cases and their risks."""

from engine.measure import measure_case
from engine.ops.tree_accept.cases import random_case

from .harness import operator_tests

test_case, test_row_invariance, test_refusal = operator_tests("tree_accept")


def test_random_walks(library):
    """200 random trees against the walk by parents, state, stop tokens and limits included."""
    operator = library.operator("tree_accept")
    for seed in range(100, 300):
        for measurement in measure_case(operator, random_case(seed)):
            assert measurement.within, measurement
