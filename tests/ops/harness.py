"""The tests that every operator has."""

import pytest

from engine.check import cases_of
from engine.measure import measure_case, measure_invariance, measure_refusal


def operator_tests(name: str):
    """(test_case, test_row_invariance, test_refusal) of one operator; None where its table has no such cases."""
    module = cases_of(name)

    @pytest.mark.parametrize("case", module.CASES, ids=lambda case: case.name)
    def test_case(library, case):
        for measurement in measure_case(library.operator(name), case):
            assert measurement.within, f"{measurement}; risk: {case.risk}"

    return test_case, _row_invariance(name, module), _refusal(name, module)


def _row_invariance(name, module):
    cases = [case for case in module.CASES if case.invariance]

    @pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
    def test_row_invariance(library, case):
        measurement = measure_invariance(library.operator(name), case)
        assert measurement.within, f"{measurement}; bytes differ"

    return test_row_invariance if cases else None


def _refusal(name, module):
    refusals = getattr(module, "REFUSALS", ())

    @pytest.mark.parametrize("refusal", refusals, ids=lambda refusal: refusal.name)
    def test_refusal(library, refusal):
        measurement = measure_refusal(library.operator(name), refusal)
        assert measurement.within, measurement.message

    return test_refusal if refusals else None
