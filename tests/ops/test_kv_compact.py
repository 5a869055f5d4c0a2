"""kv_compact against its numpy twin: engine/ops/kv_compact/cases.py names the cases and their risks."""

from .harness import operator_tests

test_case, test_row_invariance, test_refusal = operator_tests("kv_compact")
