"""w4a16_gemm against its numpy twin: engine/ops/w4a16_gemm/cases.py names the cases and their risks."""

from .harness import operator_tests

test_case, test_row_invariance, test_refusal = operator_tests("w4a16_gemm")
