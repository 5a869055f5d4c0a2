"""The benchmark at sizes that take no time: its subjects compute the same, and its record can be plotted."""

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from engine.bench_cpu import __main__ as bench
from engine.bench_cpu import timing
from engine.bench_cpu.subjects import Experts, Gemm

ROOT = Path(__file__).resolve().parents[2]
WORKS = {
    "gemm": lambda: Gemm(96, 64, max_rows=16, copies=3),
    "experts": lambda: Experts(64, 32, n_experts=5, top_k=2, max_rows=16),
}


@pytest.fixture(scope="module")
def read_library(tmp_path_factory):
    made = tmp_path_factory.mktemp("read") / "libread.so"
    source = ROOT / "engine/bench_cpu/read.cpp"
    subprocess.run(["g++", "-O1", "-fopenmp", "-shared", "-fPIC", source, "-o", made], check=True)
    return made


@pytest.fixture
def cases(request, library, read_library, monkeypatch):
    monkeypatch.setenv("KDTREE_CPU", "")
    monkeypatch.setattr(bench, "COLD_BYTES", 1 << 17)
    monkeypatch.setattr(bench, "READ_BYTES", 1 << 16)
    made = bench.measure_operator(library, WORKS[request.param](), read_library, rounds=2)
    monkeypatch.setenv("KDTREE_CPU", "")
    library.call(library.init)
    return made


@pytest.mark.parametrize("cases", WORKS, indirect=True)
def test_subjects_agree_with_torch(cases):
    for case in cases:
        assert {"portable", "torch"} <= case["subjects"].keys()
        for name, subject in case["subjects"].items():
            assert subject["disagreement"] < 0.02, (name, case)
            assert subject["wall_ms"] >= subject["best_ms"] > 0
        assert case["subjects"]["torch"]["torch_ratio"] == {"wall": 1, "cpu": 1}


@pytest.mark.parametrize("cases", ["gemm"], indirect=True)
def test_plot(cases, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from engine.bench_cpu.plot import plot

    subject = cases[0]["subjects"]["portable"]
    subjects = {"transformers F32": subject, "portable F32": subject}
    decode = {"parameters": 1, "activations": "float32", "subjects": subjects}
    plot({"machine": {"cpu": "any", "cores": 1}, "operators": cases, "decode": [decode]}).savefig(tmp_path / "plot.png")


def test_rounds_start_with_another_subject(monkeypatch):
    monkeypatch.setattr(timing, "BURST_S", 0)  # one call a sample
    calls = []
    times = timing.interleaved({name: [lambda name=name: calls.append(name)] for name in "ab"}, rounds=3)
    assert "".join(calls) == "aabb" + "ab" + "ba" + "ab"
    assert [len(times[name].wall) for name in "ab"] == [3, 3]


def test_ratios_are_of_a_round():
    mine, other = timing.Times([1.0, 10.0, 2.0], [1, 1, 1]), timing.Times([2.0, 20.0, 5.0], [3, 3, 3])
    assert mine.ratios(other) == {"wall": 2.0, "cpu": 3.0}
