"""Runs every case of one operator many times on one library: the outputs must be the same bytes.

    python -m tests.cuda.repeats --library LIB --operator NAME [--repeats 100] --output FILE
"""

import argparse
import json
from pathlib import Path

from engine.check import cases_of
from engine.operators import Library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--operator", required=True)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    operator = Library(options.library).operator(options.operator)
    cases = []
    for case in cases_of(options.operator).CASES:
        call = case.call()
        first = operator.run(call)
        differing = sum(
            any(again[name].tobytes() != first[name].tobytes() for name in first)
            for again in (operator.run(call) for _ in range(options.repeats - 1))
        )
        cases.append({"name": f"repeats.{case.name}", "max_abs_error": float(differing), "budget": 0.0})
    options.output.parent.mkdir(parents=True, exist_ok=True)
    record = {"operator": options.operator, "backend": "cuda", "cases": cases}
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
