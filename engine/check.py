"""Checks one operator of one backend against its numpy twin and writes what it measured.

    python -m engine.check --library results/build/cpu/libkdtree_cpu.so --operator rope --output rope.json

The record is `{operator, backend, cases: [{name, max_abs_error, budget}]}`. This program does not judge (verify does):
an error above its budget is written like any other. An error that is no number is written as the string "nan" or
"inf", which compares with no budget; `message` says why.
"""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path

from engine import contract
from engine.measure import Measurement, measure_case, measure_invariance, measure_no_rows, measure_refusal
from engine.operators import Library, OperatorError
from reference.files import write_text


def cases_of(name: str):
    """The module engine/ops/<op>/cases.py: CASES; where there are such, LARGE (cases of gigabytes) and REFUSALS."""
    return importlib.import_module(f"engine.ops.{name}.cases")


def check(library: Library, name: str, large: bool = False) -> list[Measurement]:
    """All measurements of operator `name`: each case, row invariance, a call without rows, refused shapes."""
    module, operator = cases_of(name), library.operator(name)
    cases = [*module.CASES, *(getattr(module, "LARGE", ()) if large else ())]
    measurements = [m for case in cases for m in measure_case(operator, case)]
    by_row = [case for case in module.CASES if case.invariance]
    measurements += [measure_invariance(operator, case) for case in by_row]
    measurements += [measure_no_rows(operator, case) for case in by_row if "n_rows" in case.call().args]
    measurements += [measure_refusal(operator, refusal) for refusal in getattr(module, "REFUSALS", ())]
    return measurements


def record(measurement: Measurement) -> dict:
    """One entry of the file."""
    error = measurement.max_abs_error
    entry = {
        "name": measurement.name,
        "max_abs_error": error if math.isfinite(error) else "nan" if math.isnan(error) else "inf",
        "budget": measurement.budget,
    }
    return entry | ({"message": measurement.message} if measurement.message else {})


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.check", description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, type=Path)
    parser.add_argument("--operator", required=True, choices=contract.operator_names(), metavar="NAME")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--large", action="store_true", help="also cases of gigabytes (64 GiB of host memory)")
    options = parser.parse_args(arguments)

    try:
        library = Library(options.library)
    except (OSError, OperatorError) as error:
        print(f"error: {options.library}: {error}", file=sys.stderr)
        return 2
    measurements = check(library, options.operator, options.large)
    content = {
        "operator": options.operator,
        "backend": library.backend_name,
        "variant": library.variant_name,
        "cases": [record(m) for m in measurements],
    }
    write_text(options.output, json.dumps(content, indent=1, allow_nan=False) + "\n")
    over = sum(not m.within for m in measurements)
    print(f"{options.operator}: {len(measurements)} measurements, {over} above budget")
    return 0


if __name__ == "__main__":
    sys.exit(main())
