"""A quick run of the fuzzer, and proof that it finds what is planted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import Supervisor
from tests.fuzz.cases import CASES, KINDS, Malformed, require_form
from tests.fuzz.plant import plant_fault

ROOT = Path(__file__).resolve().parents[2]


def fuzz(library: Path, output: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.fuzz", "--library", library, "--output", output, *arguments]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)


def test_quick(sanitized, tmp_path):
    """Nothing fails, and every kind of case is both refused and let through: neither side goes untested."""
    output = tmp_path / "fuzz.json"
    done = fuzz(sanitized("address") / "libkdtree_cpu.so", output, "--cases", "3000", "--workers", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(output.read_text())["outcomes"]
    assert outcomes.keys() == CASES.keys()
    assert sum(count for counts in outcomes.values() for count in counts.values()) == 3000
    assert set(outcomes.pop("model")) == {"decoded"}
    for kind, counts in outcomes.items():
        assert any(outcome.startswith("refused") for outcome in counts), kind
        assert counts.get("decoded" if kind != "config" else "accepted", 0) > 0, kind


def test_same_seed_same_outcomes(sanitized, tmp_path):
    library, files = sanitized("address") / "libkdtree_cpu.so", [tmp_path / "1.json", tmp_path / "2.json"]
    for workers, file in enumerate(files, 1):
        done = fuzz(library, file, "--cases", "150", "--seed", "7", "--workers", str(workers))
        assert done.returncode == 0, done.stderr[-4000:]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("new", "what"),
    [
        pytest.param("", "exit status", id="token_outside_the_vocabulary"),
        pytest.param("for (volatile int i = 1; i;) {}", "no end after", id="endless_loop"),
        pytest.param('fail("that will not do");', "refusal of the wrong form", id="wrong_form"),
    ],
)
def test_planted_fault_is_found(sanitized, tmp_path, new, what):
    old = 'require_tokens("script", request.script, request.script_length, config.vocab_size);'
    library = plant_fault(sanitized("address"), tmp_path, "engine/core/limits.cpp", old, new)
    supervisor = Supervisor(library, seed=1, seconds=4)
    cases = 400 if what == "exit status" else 2
    supervisor.run(range(KINDS.index("arguments"), cases * len(KINDS), len(KINDS)))
    assert supervisor.failures
    for failure in supervisor.failures:
        assert failure["what"].startswith(what)


@pytest.mark.parametrize(
    "message",
    ["no form at all", "field: value", "field: value: two\nlines", "a\x1bb: c: d", "f: v: " + "long" * 300],
)
def test_wrong_form(message):
    with pytest.raises(Malformed):
        require_form(message)


def test_right_form():
    require_form("model.norm.weight: [3]: shape must be [4]")
