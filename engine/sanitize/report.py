"""Gathers the records of the sanitized runs; fails, naming them, if any is not clean.

python -m engine.sanitize.report RECORD … --output FILE
"""

import argparse
import json
import sys
from pathlib import Path

from reference.files import write_text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    records = [json.loads(file.read_text()) for file in args.records]
    unclean = [record for record in records if not record["clean"]]
    for record in unclean:
        print(f"error: {record['subject']}: {record['flavour']}: {record['finding']}", file=sys.stderr)
    if unclean:
        return 1
    write_text(args.output, json.dumps({"clean": True, "runs": records}, indent=1) + "\n")
    print(f"sanitizers: {len(records)} subjects clean, {sum(sum(record['runs'].values()) for record in records)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
