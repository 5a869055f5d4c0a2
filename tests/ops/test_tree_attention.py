"""tree_attention against its numpy twin: engine/ops/tree_attention/cases.py names the cases and their risks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.measure import BFLOAT16, FLOAT32, measure_case, measure_invariance
from engine.ops.tree_attention.cases import TreeAttentionCase

from .harness import operator_tests

TYPES = (FLOAT32, BFLOAT16)

test_case, test_row_invariance, test_refusal = operator_tests("tree_attention")


@st.composite
def trees(draw):
    """Parents of up to 12 rows, a parent before its children."""
    return (-1, *(draw(st.integers(0, row - 1)) for row in range(1, draw(st.integers(1, 12)))))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(trees(), st.integers(0, 150), st.sampled_from(TYPES))
def test_any_tree(library, parents, prefix, element):
    """Values of any tree, and every row's bytes as plain decoding gives them."""
    case = TreeAttentionCase(name="any", risk="", parents=parents, prefix=prefix, heads=2, type=element)
    operator = library.operator("tree_attention")
    for measurement in [*measure_case(operator, case), measure_invariance(operator, case)]:
        assert measurement.within, measurement
