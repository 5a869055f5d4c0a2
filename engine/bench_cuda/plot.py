"""results/bench/cuda.json -> a plot.

python -m engine.bench_cuda.plot INPUT OUTPUT
"""

import sys

import matplotlib

from engine import bench_plot

matplotlib.use("Agg")
from matplotlib import pyplot

STYLES = {  # colour and line of a subject
    "ours": ("#1b6ca8", "-"),
    "ours_gemms": ("#1b6ca8", "--"),
    "humming": ("#e07a3f", "-"),
    "humming_gemms": ("#e07a3f", "--"),
    "tinygemm": ("#5a9e6f", "-"),
    "cublas_bf16": ("#888888", "-"),
}
COLUMNS = 3


def panels(cases: list[dict]) -> dict[tuple, list[dict]]:
    """Cases by what they share but the rows."""
    of = {}
    for case in cases:
        of.setdefault((case["part"], case["operator"], case["shape"], case.get("routing")), []).append(case)
    return of


def plot_panel(axes, key: tuple, cases: list[dict]) -> None:
    """Experts: the share of the floor, by rows. Others: microseconds, over the floor."""
    part, operator, shape, routing = key
    for name, (colour, line) in STYLES.items():
        points = [(c["rows"], c["subjects"][name]) for c in cases if "us" in c["subjects"].get(name, {})]
        if points:
            values = [s["fraction"] if part == "experts" else s["us"]["median"] for _, s in points]
            rows, label = [rows for rows, _ in points], name.replace("_", " ")
            axes.plot(rows, values, line, marker=".", color=colour, label=label)
    if part == "experts":
        axes.set_ylim(0, 1)
        axes.set_ylabel("share of the floor")
    else:
        rows, floors = [c["rows"] for c in cases], [c["floor_us"] for c in cases]
        axes.plot(rows, floors, ":", color="black", label="floor")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("µs")
    axes.set_xscale("log", base=2)
    axes.set_xticks([c["rows"] for c in cases], [str(c["rows"]) for c in cases])
    axes.set_xlabel("rows")
    axes.set_title("\n".join(filter(None, [operator, f"{shape}, {routing} routing" if routing else shape])), fontsize=9)
    axes.legend(fontsize=7)


def plot(record: dict):
    """The figure: a panel a shape."""
    if not any("us" in subject for case in record["cases"] for subject in case["subjects"].values()):
        raise ValueError("nothing was measured")
    of = panels(record["cases"])
    rows = -(-len(of) // COLUMNS)
    figure, grid = pyplot.subplots(rows, COLUMNS, figsize=(5 * COLUMNS, 3.4 * rows), squeeze=False)
    for axes, (key, cases) in zip(grid.flat, of.items(), strict=False):
        plot_panel(axes, key, cases)
    for axes in grid.flat:
        axes.set_visible(axes.has_data())
    figure.suptitle(f"{record['gpu']}, {record['variant']}, reads {record['read_gb_s']:.0f} GB/s", fontsize=10)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    sys.exit(bench_plot.main(__doc__, plot))
