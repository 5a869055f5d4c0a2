"""tree_accept against its numpy twin: engine/ops/tree_accept/cases.py names the cases and their risks."""

from .harness import operator_tests

test_case, test_row_invariance, test_refusal = operator_tests("tree_accept")
