"""gemm against its numpy twin: engine/ops/gemm/cases.py names the cases and their risks."""

from .harness import operator_tests

test_case, test_row_invariance, test_refusal = operator_tests("gemm")
