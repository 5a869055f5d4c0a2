"""Breaks the project one line at a time and sees whether the right check notices.

python -m tests.mutations.run --targets results/a.pass … --output FILE [--only TEXT]

Every fault of faults.yaml is put into a scratch copy of the tree, results and their provenance included, so that the
ladder reruns just what the fault touches. Caught means: the ladder (or the tests that the fault names) fails, and says
what the fault's `by` expects. One fault not caught: exit status 1, and no file.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from reference.files import write_text

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.yaml")
TIMEOUT_S = 600  # a fault may also make something loop


def copy_tree(scratch: Path) -> None:
    """The tree, results and snakemake's records, with their times; no caches, no locks."""
    skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "locks", "incomplete")
    shutil.copytree(ROOT, scratch, ignore=skipped, dirs_exist_ok=True)


def put_in(fault: dict, root: Path) -> None:
    """Raises SystemExit if the table is stale."""
    text = (root / fault["file"]).read_text()
    if text.count(fault["find"]) != 1:
        raise SystemExit(
            f"error: {FAULTS.name}: {fault['name']}: find: stands {text.count(fault['find'])} times in "
            f"{fault['file']}, not once"
        )
    (root / fault["file"]).write_text(text.replace(fault["find"], fault["replace"]))


def provoke(fault: dict, targets: list[str], scratch: Path) -> tuple[bool, str]:
    """(failed, everything it printed)"""
    if "tests" in fault:
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *fault["tests"].split()]
    else:
        command = [sys.executable, "-m", "snakemake", "--cores", "2", *targets]
    try:
        run = subprocess.run(
            command,
            cwd=scratch,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        )
    except subprocess.TimeoutExpired as timeout:
        return True, f"no end after {TIMEOUT_S} s\n{timeout.stdout or ''}"
    return run.returncode != 0, run.stdout


def try_fault(fault: dict, targets: list[str]) -> dict:
    """One row of the report."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        scratch = Path(folder)
        copy_tree(scratch)
        put_in(fault, scratch)
        failed, output = provoke(fault, targets, scratch)
    lines = [line.strip() for line in output.splitlines() if re.search(fault["by"], line)]
    caught = failed and bool(lines)
    if not caught:
        print(f"NOT CAUGHT: {fault['name']} ({'failed otherwise' if failed else 'nothing failed'})", file=sys.stderr)
        print("\n".join(output.splitlines()[-25:]), file=sys.stderr)
    row = {key: fault[key] for key in ("name", "file", "rule")}
    return row | {"caught": caught, "by": lines[0] if lines else None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", required=True, help="verdicts, which must be up to date")
    parser.add_argument("--only", default="", help="the faults whose name holds this")
    parser.add_argument("--every", type=int, default=1, help="every n-th of them")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    faults = [fault for fault in yaml.safe_load(FAULTS.read_text()) if args.only in fault["name"]][:: args.every]
    rows = []
    for index, fault in enumerate(faults, 1):
        begin = time.perf_counter()
        rows.append(try_fault(fault, args.targets))
        print(
            f"{index}/{len(faults)} {'caught' if rows[-1]['caught'] else 'NOT CAUGHT'}: {fault['name']} "
            f"({time.perf_counter() - begin:.0f} s): {rows[-1]['by']}",
            flush=True,
        )
    caught = sum(row["caught"] for row in rows)
    print(f"score: {caught}/{len(rows)} faults caught")
    if caught < len(rows):
        return 1
    write_text(args.output, json.dumps({"score": f"{caught}/{len(rows)}", "mutations": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
