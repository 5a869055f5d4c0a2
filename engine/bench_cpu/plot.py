"""results/bench/cpu.json -> a plot.

python -m engine.bench_cpu.plot INPUT OUTPUT
"""

import sys

import matplotlib

from engine import bench_plot

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"avx512": "#1b6ca8", "avx2": "#5fa8d3", "portable": "#b8d8e8", "torch": "#e07a3f"}


def plot_products(axes, title: str, cases: list[dict]) -> None:
    """GB/s of weights by rows, one bar a subject, under the line of what reading them costs."""
    names = [name for name in COLOURS if name in cases[0]["subjects"]]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [case["subjects"][name]["gb_s"] for case in cases]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(cases))]
        axes.bar(places, heights, width, label=name, color=COLOURS[name])
    for x, case in enumerate(cases):
        axes.hlines(case["read_gb_s"], x - 0.45, x + 0.45, colors="black", label="memory read" if x == 0 else None)
    axes.set_xticks(range(len(cases)), [case["rows"] for case in cases])
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("rows")
    axes.set_ylabel("GB/s of INT4 weights")


def plot_decode(axes, entry: dict) -> None:
    """Milliseconds a token."""
    subjects = entry["subjects"]
    colours = [COLOURS["torch" if name.startswith("transformers") else name.split()[0]] for name in subjects]
    axes.barh(list(subjects), [s["wall_ms"] for s in subjects.values()], color=colours)
    axes.invert_yaxis()
    axes.set_title(f"{entry['parameters'] / 1e6:.0f} M parameters, {entry['activations']} activations", fontsize=9)
    axes.set_xlabel("ms a token")


def plot(results: dict):
    """The figure: a row of products for each number of threads, a row of whole models."""
    keys = dict.fromkeys((c["operator"], c["shape"], c["threads"]) for c in results["operators"])
    threads = sorted({key[2] for key in keys})
    columns = max(len(keys) // len(threads), len(results["decode"]))
    rows = len(threads) + 1
    figure, grid = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.2 * rows), squeeze=False)
    for row, count in enumerate(threads):
        of_row = [key for key in keys if key[2] == count]
        for axes, key in zip(grid[row], of_row, strict=False):
            cases = [c for c in results["operators"] if (c["operator"], c["shape"], c["threads"]) == key]
            plot_products(axes, f"{key[0]}\n{key[1]}, {count} thread{'s' * (count > 1)}", cases)
    for axes, entry in zip(grid[-1], results["decode"], strict=False):
        plot_decode(axes, entry)
    for axes in grid.flat:
        axes.set_visible(axes.has_data())
    figure.suptitle(f"{results['machine']['cpu']}, {results['machine']['cores']} cores", fontsize=10)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower right", fontsize=9)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    sys.exit(bench_plot.main(__doc__, plot))
