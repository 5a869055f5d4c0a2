"""The CUDA benchmark where there is no GPU: routings, bytes, rounds, records and the plot."""

import ctypes
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.overrides import TorchFunctionMode  # noqa: E402

from engine.bench_cpu.subjects import Matrix  # noqa: E402
from engine.bench_cuda import __main__ as bench  # noqa: E402
from engine.bench_cuda import humming, routing, subjects, timing  # noqa: E402

EXPERTS, TOP_K = 384, 8


@pytest.mark.parametrize("draw", [routing.uniform, routing.correlated])
def test_a_row_has_different_experts(draw):
    ids = draw(64, EXPERTS, TOP_K, np.random.default_rng(1))
    assert ids.shape == (64, TOP_K) and ids.dtype == np.int32
    assert all(len(set(row)) == TOP_K for row in ids.tolist())
    assert 0 <= ids.min() and ids.max() < EXPERTS


def test_correlated_rows_share_experts():
    """A slot leaves its parent's expert with probability 0.2: that many new experts a row, less what was hit before."""
    hits = {
        name: np.mean([routing.experts_hit(draw(64, EXPERTS, TOP_K, np.random.default_rng(i))) for i in range(40)])
        for name, draw in (("uniform", routing.uniform), ("correlated", routing.correlated))
    }
    assert abs(hits["uniform"] - EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** 64)) < 3
    assert TOP_K + 0.6 * 63 * TOP_K * 0.2 < hits["correlated"] < TOP_K + 1.1 * 63 * TOP_K * 0.2
    same = routing.correlated(64, EXPERTS, TOP_K, np.random.default_rng(1), keep=1)
    assert routing.experts_hit(same) < 2 * TOP_K


def test_bytes_of_an_expert_are_those_of_three_matrices():
    sizes = subjects.Sizes(hidden=96, width=64)
    assert sizes.expert_bytes == 2 * Matrix.random(64, 96, 1).n_bytes + Matrix.random(96, 64, 1).n_bytes
    assert subjects.Sizes().expert_bytes == 24_772_608


def test_words_are_the_bundles():
    matrix = Matrix.random(5, 64, seed=3)
    assert torch.equal(subjects.unpacked(torch.from_numpy(matrix.qw())), matrix.codes.int())
    want = (matrix.codes.double() - 8).view(5, 2, 32) * matrix.scales.double()[..., None]
    assert torch.equal(subjects.dequantised(matrix.codes, matrix.scales), want.view(5, 64))


def test_rounds_start_with_another_subject_and_the_first_do_not_count():
    calls, clock = [], iter(range(1, 100))

    def subject(name):
        def run():
            calls.append(name)
            return float(next(clock))

        return run

    spreads = timing.interleaved({name: subject(name) for name in "ab"}, rounds=4)
    assert "".join(calls) == "abbaab" + "baabbaab"
    assert spreads == {"a": timing.Spread(8.0, 10.5, 13.0), "b": timing.Spread(7.0, 10.5, 14.0)}


def test_a_graph_reads_enough():
    assert timing.passes(8, 200e6) == 1
    assert timing.passes(19, 16.5e6) * 19 * 16.5e6 >= timing.GRAPH_BYTES > (timing.passes(19, 16.5e6) - 1) * 19 * 16.5e6


class FakeReplay:
    """Ten microseconds a call."""

    def __init__(self, _stream, calls, passes):
        for call in calls:
            call()

    def time(self):
        return 10.0

    def burst(self, microseconds, sensors):
        return {"sm_mhz": 1980, "watts": None}


@pytest.fixture
def case():
    def subject(y):
        return lambda: subjects.Subject([lambda: None], lambda: torch.tensor(y), 1000.0)

    def broken():
        raise RuntimeError("no such\nkernel")

    want = torch.tensor([1.0, 2.0], dtype=torch.float64)
    make = {"ours": subject([1.0, 2.01]), "wrong": subject([1.0, float("nan")]), "broken": broken}
    labels = {"operator": "gemm", "shape": "2→2", "rows": 1}
    return subjects.Case(labels, 1000.0, make, lambda y: subjects.relative(y, want))


@pytest.fixture
def measured(case, monkeypatch):
    monkeypatch.setattr(bench, "Replay", FakeReplay)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    made = bench.Bench(timing.Sensors(), rounds=3)
    made.read_gb_s = 0.2  # GB/s: 1000 bytes in 5 microseconds
    return made.measure(case)


def test_a_peer_that_fails_or_is_wrong_leaves_the_others(measured):
    ours = measured["subjects"]["ours"]
    assert measured["floor_us"] == 5 and ours["fraction"] == 0.5 and 0 < ours["relative_error"] < 0.01
    assert ours["us"] == {"p10": 10, "median": 10, "p90": 10} and ours["sm_mhz"] == 1980
    assert measured["subjects"]["wrong"] == {"error": "ArithmeticError: relative error nan"}
    assert measured["subjects"]["broken"] == {"error": "RuntimeError: no such kernel"}
    line = bench.told(measured)
    assert "gemm 2→2 1 rows floor 5.0 us | ours 10.0 (0.5) 1980 MHz None W | wrong FAILED" in line and "\n" not in line


def test_what_is_made_once_fails_once():
    calls = []

    def make():
        calls.append(0)
        raise ValueError("no")

    made = subjects.once(make)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            made()
    assert len(calls) == 1 and subjects.once(lambda: 7)() == 7


def test_sensors_are_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sensors = timing.Sensors()
    assert sensors.reason and sensors.read() == {}


def test_humming_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "humming", None)
    with pytest.raises(ImportError):
        humming.version()


def test_records_hold_no_path_of_a_machine(tmp_path):
    given = ["--output", str(tmp_path / "cuda.json"), "results/a.so"]
    assert [bench.without_folder(a) for a in given] == ["--output", "cuda.json", "results/a.so"]
    for record in Path(__file__).parents[2].glob("docs/measurements/**/*.json"):
        assert not re.search(r'[\s"=]/\w+/', record.read_text()), record


def test_no_gpu_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ["--library", "x", "--probes", "x", "--output", str(tmp_path / "cuda.json")]
    monkeypatch.setattr(sys, "argv", ["bench_cuda", *options])
    assert bench.main() == 2
    assert capsys.readouterr().err == "error: engine.bench_cuda: torch sees no GPU\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--rounds", "0"], "--rounds: 0: must be at least 1"),
        (["--rows", "1,x"], "argument --rows: invalid numbers value: '1,x'"),
        (["--rows", "0"], f"--rows: must lie in 1..{subjects.MAX_ROWS}"),
    ],
)
def test_bad_options(option, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_cuda", "--library", "x", "--probes", "x", "--output", "x", *option])
    with pytest.raises(SystemExit) as end:
        bench.parse()
    assert end.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_plot(measured, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from engine.bench_cuda.plot import panels, plot

    timed = measured["subjects"]["ours"]
    cases = [{"part": "float", **measured, "rows": rows} for rows in (1, 8)]
    for kind in ("uniform", "correlated"):
        of_subjects = {"ours": timed, "ours_gemms": timed, "humming": {"error": "no"}}
        labels = {"part": "experts", "operator": "w4a16_moe_experts", "shape": "384 experts", "routing": kind}
        cases += [{**measured, **labels, "rows": rows, "subjects": of_subjects} for rows in (16, 64)]
    record = json.loads(json.dumps({"gpu": "any", "variant": "sm_90 stream", "read_gb_s": 4500.0, "cases": cases}))
    assert [len(of) for of in panels(record["cases"]).values()] == [2, 2, 2]
    plot(record).savefig(tmp_path / "plot.png")


# ---- the subjects, on the CPU's library ------------------------------------------------------------------------------
class OnCpu(TorchFunctionMode):
    """What asks for the GPU gets the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


class HostProbes:
    """Experts of random weights, packed by the library."""

    def __init__(self, operator):
        self._operator = operator

    def expert_bytes(self, shape):
        library, handle = self._operator.library, self._operator._handle
        return library.packed_bytes(handle, ctypes.byref(shape)) // shape.n_experts

    def fill(self, shape, expert, codes, scales):
        words, groups = self._arrays(shape._obj, codes, scales)
        rng = np.random.default_rng(expert)
        words[:] = rng.integers(-(2**31), 2**31, words.size)
        groups[:] = 0x3C80 + rng.integers(0, 0x80, groups.size)  # bf16: 1/64 … 1/32

    def pack(self, shape, expert, codes, scales, packed):
        words, groups = (array.reshape(3, -1) for array in self._arrays(shape._obj, codes, scales))
        weights = {"expert": expert}
        for i, name in enumerate(("gate", "up", "down")):
            weights |= {f"{name}_qw": words[i], f"{name}_sc": groups[i]}
        self._operator._prepare(shape._obj, weights, packed)

    def gemms(self, *_):
        pass

    @staticmethod
    def _arrays(shape, codes, scales):
        size = 3 * shape.hidden * shape.intermediate
        types = (ctypes.c_int32, codes, size // 8), (ctypes.c_uint16, scales, size // 32)
        return [np.ctypeslib.as_array((type_ * count).from_address(address)) for type_, address, count in types]


@pytest.mark.parametrize("kind", ["experts", "dense", "float"])
def test_subjects_compute_the_product(library, kind, monkeypatch):
    if library.backend_name != "cpu":
        pytest.skip("the CPU's library")
    monkeypatch.setattr(bench, "Replay", FakeReplay)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(subjects, "stream", lambda: None)
    monkeypatch.setattr(subjects, "COLD_BYTES", 1 << 14)
    made = bench.Bench(timing.Sensors(), rounds=1)
    made.read_gb_s = 1
    with OnCpu():
        if kind == "experts":
            probes = HostProbes(library.operator("w4a16_moe_experts"))
            sizes = subjects.Sizes(hidden=64, width=32, n_experts=12, top_k=3)
            work = subjects.Experts(library, probes, sizes, lambda layer: {})
        elif kind == "dense":
            work = subjects.Dense(library, 96, 64, lambda product: {})
        else:
            work = subjects.Float(library, 600, 96)
        cases = list(made.measured(work, [1, 16]))
    assert [case["rows"] for case in cases] == ([1, 16, 16] if kind == "experts" else [1, 16])
    for case in cases:
        errors = {name: s.get("relative_error") for name, s in case["subjects"].items() if name != "tinygemm"}
        assert len(errors) == 2 and all(0 < error < 0.006 for error in errors.values()), case
