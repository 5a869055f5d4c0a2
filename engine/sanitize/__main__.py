"""Runs one subject, an operator's checks or `decode`, with a sanitized library, and records whether that was clean.

python -m engine.sanitize --flavour address|thread --library LIB --subject NAME [--bundles FILE …] --output FILE

The record is `{flavour, subject, clean, runs: {path: count}, finding}`: `runs` counts what was run on every path of the
kernels that this CPU has, `finding` is the sanitizer's summary, and the whole report goes to stderr. This program does
not judge (engine.sanitize.report does).
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from engine.sanitize import FLAVOURS, PATHS, environment, python
from reference.files import write_text

FINDING = re.compile(r"^(?:SUMMARY: .*|.*: runtime error: .*|.*(?:Address|Thread)Sanitizer.*)$", re.MULTILINE)


def sanitize(flavour: str, library: Path, subject: str, bundles: list[Path]) -> tuple[dict, str]:
    """(the record, the sanitizer's report). Raises ChildProcessError if the run failed for another reason."""
    command = python(flavour, "-m", "engine.sanitize.subject", str(library), subject, *map(str, bundles))
    record = {"flavour": flavour, "subject": subject, "clean": True, "runs": {}, "finding": None}
    for path in PATHS:
        variables = environment(flavour) | {"KDTREE_CPU": path}
        run = subprocess.run(command, env=variables, capture_output=True, text=True)
        if run.returncode == 0:
            if count := int(run.stdout):
                record["runs"][path] = count
            continue
        findings = FINDING.findall(run.stderr)
        if not findings:
            raise ChildProcessError(f"{subject}: exit status {run.returncode}: {run.stderr.strip()[-2000:]}")
        summaries = [line for line in findings if line.startswith("SUMMARY")]
        return record | {"clean": False, "finding": f"{path}: {(summaries or findings)[0]}"}, run.stderr
    return record, ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--flavour", required=True, choices=FLAVOURS)
    parser.add_argument("--library", required=True, type=Path)
    parser.add_argument("--subject", required=True, help="an operator, or `decode`")
    parser.add_argument("--bundles", nargs="*", default=[], type=Path, help="decode: what to decode")
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    record, report = sanitize(args.flavour, args.library, args.subject, args.bundles)
    print(report, end="", file=sys.stderr)
    print(f"{args.flavour} {args.subject}: {'clean' if record['clean'] else record['finding']}")
    write_text(args.output, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
