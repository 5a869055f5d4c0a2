"""The record of a check: written whole, and an error that is no number cannot be taken for a small one."""

import json
import math

import pytest

from engine import check
from engine.measure import Measurement


@pytest.mark.parametrize(("error", "text"), [(math.nan, "nan"), (math.inf, "inf")])
def test_what_is_no_number_is_text(error, text):
    entry = check.record(Measurement("case", error, 1.0, "why"))
    assert entry == {"name": "case", "max_abs_error": text, "budget": 1.0, "message": "why"}
    with pytest.raises(TypeError):
        _ = entry["max_abs_error"] <= entry["budget"]


def test_records_every_case(library_path, tmp_path):
    output = tmp_path / "checks" / "rope.json"
    assert check.main(["--library", str(library_path), "--operator", "rope", "--output", str(output)]) == 0
    content = json.loads(output.read_text())
    names = [case["name"] for case in content["cases"]]
    module = check.cases_of("rope")
    assert content["operator"] == "rope" and len(set(names)) == len(names)
    assert {case.name for case in module.CASES} <= set(names)
    assert {f"row_invariance.{case.name}" for case in module.CASES if case.invariance} <= set(names)
    assert {f"refuses.{refusal.name}" for refusal in module.REFUSALS} <= set(names)
    assert [path.name for path in output.parent.iterdir()] == ["rope.json"]


def test_no_library_is_one_line(tmp_path, capsys):
    library, output = tmp_path / "libkdtree_cpu.so", tmp_path / "rope.json"
    assert check.main(["--library", str(library), "--operator", "rope", "--output", str(output)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {library}: ") and not output.exists()


@pytest.mark.parametrize("name", check.contract.operator_names())
def test_every_operator_has_named_cases(name):
    module = check.cases_of(name)
    names = [case.name for case in module.CASES]
    assert len(set(names)) == len(names) and all(case.risk for case in module.CASES)
