"""A record that cannot be plotted is one line, and no file."""

import json
import sys

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from engine import bench_plot
from engine.bench_cpu.plot import plot as plot_cpu
from engine.bench_cuda.plot import plot as plot_cuda

SUBJECT = {"us": {"median": 1.0}, "fraction": 0.5}
CASE = {"part": "float", "operator": "gemm", "shape": "8→8", "rows": 1, "floor_us": 0.5, "subjects": {"ours": SUBJECT}}
RECORD = {"gpu": "any", "variant": "any", "read_gb_s": 1.0, "cases": [CASE]}


def ended(monkeypatch, plot, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["plot", *map(str, arguments)])
    return bench_plot.main("", plot)


@pytest.mark.parametrize("plot", [plot_cpu, plot_cuda])
@pytest.mark.parametrize(
    "content",
    [None, "", "{", "{}", "[]", "3", json.dumps({**RECORD, "cases": []}), json.dumps({**RECORD, "cases": [{}]})],
)
def test_no_record(plot, content, tmp_path, monkeypatch, capsys):
    record, image = tmp_path / "record.json", tmp_path / "plot.png"
    if content is not None:
        record.write_text(content)
    assert ended(monkeypatch, plot, record, image) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and str(record) in line and not image.exists()


def test_no_kind_of_image(tmp_path, monkeypatch, capsys):
    record = tmp_path / "record.json"
    record.write_text(json.dumps(RECORD))
    assert ended(monkeypatch, plot_cuda, record, tmp_path / "plot.nope") == 2
    assert "plot.nope: .nope: must be one of " in capsys.readouterr().err
    assert ended(monkeypatch, plot_cuda, record, tmp_path / "new" / "plot.png") == 0
    assert (tmp_path / "new" / "plot.png").stat().st_size > 1000
