"""moe_experts against its numpy twin: engine/ops/moe_experts/cases.py names the cases and their risks."""

from .harness import operator_tests

test_case, test_row_invariance, test_refusal = operator_tests("moe_experts")
