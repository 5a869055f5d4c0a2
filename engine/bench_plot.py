"""What plots of benchmarks share: the command line."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from reference.files import read_json, whole


def main(doc: str, plot: Callable) -> int:
    """INPUT OUTPUT: `plot(record)` makes the figure of INPUT's record. What is wrong with either is one line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    try:
        figure = drawn(read_json(args.input), plot, args.input)
        formats = figure.canvas.get_supported_filetypes()
        kind = args.output.suffix.removeprefix(".")
        if kind not in formats:
            raise ValueError(f"{args.output}: .{kind}: must be one of {', '.join(sorted(formats))}")
        with whole(args.output) as file:
            figure.savefig(file, format=kind, dpi=120)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def drawn(record, plot: Callable, path: Path):
    """The figure. Raises ValueError if the record is of something else, or empty."""
    try:
        return plot(record)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}: must be a record of this benchmark") from None
