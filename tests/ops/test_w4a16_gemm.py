"""w4a16_gemm against its numpy twin: engine/ops/w4a16_gemm/cases.py names the cases and their risks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.measure import BFLOAT16, FLOAT32, measure_case, measure_invariance
from engine.ops.w4a16_gemm.cases import W4a16GemmCase

from .harness import operator_tests

TYPES = (FLOAT32, BFLOAT16)

test_case, test_row_invariance, test_refusal = operator_tests("w4a16_gemm")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(9, 40), st.integers(1, 70), st.integers(1, 6), st.sampled_from([32, 64, 128]), st.sampled_from(TYPES)
)
def test_any_shape(library, rows, n, groups, group, element):
    """Values and row invariance of any shape."""
    case = W4a16GemmCase(
        name="any",
        risk="",
        rows=rows,
        max_rows=rows,
        n=n,
        k=groups * group,
        group=group,
        type=element,
        scale_type=element,
    )
    operator = library.operator("w4a16_gemm")
    for measurement in [*measure_case(operator, case), measure_invariance(operator, case)]:
        assert measurement.within, measurement
