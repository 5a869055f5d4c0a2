"""The sanitizers find what is planted, and say which operator; without it they find nothing.

A plant names the line as it stands; when the kernel changes, so does the entry here.
"""

from dataclasses import dataclass

import pytest

from engine.sanitize.__main__ import sanitize
from tests.fuzz.plant import plant_fault


@dataclass(frozen=True)
class Plant:
    name: str
    flavour: str
    operator: str
    old: str
    new: str
    finding: str


PLANTS = [
    Plant("write_past_the_end", "address", "argmax", "i < *args.n_rows", "i <= *args.n_rows", "heap-buffer-overflow"),
    Plant("read_past_the_end", "address", "argmax", "c < shape.cols", "c <= shape.cols", "heap-buffer-overflow"),
    Plant("overflow", "address", "argmax", "int32_t best = -1;", "int32_t best = -1 << shape.cols;", "runtime error"),
    Plant("shared_scratch", "thread", "tree_attention", "omp_get_thread_num()", "0", "data race"),
    Plant(
        "shared_counter", "thread", "w4a16_gemm", "const int64_t at =", "inputs[0] = 1; const int64_t at =", "data race"
    ),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_planted_fault_is_found(sanitized, tmp_path, plant):
    file = f"engine/ops/{plant.operator}/cpu.cpp"
    library = plant_fault(sanitized(plant.flavour), tmp_path, file, plant.old, plant.new)
    record, report = sanitize(plant.flavour, library, plant.operator, [])
    assert not record["clean"]
    assert plant.finding in record["finding"]
    assert file in report


@pytest.mark.parametrize(("flavour", "operator"), [("address", "argmax"), ("thread", "w4a16_gemm")])
def test_nothing_is_found_where_nothing_is(sanitized, flavour, operator):
    record, report = sanitize(flavour, sanitized(flavour) / "libkdtree_cpu.so", operator, [])
    assert record["clean"], report
    assert record["runs"].keys() >= {"portable"} and min(record["runs"].values()) > 5


def test_failure_that_is_no_finding(sanitized):
    """A check that cannot run at all is neither clean nor a finding."""
    with pytest.raises(ChildProcessError, match="no_such_operator"):
        sanitize("address", sanitized("address") / "libkdtree_cpu.so", "no_such_operator", [])
