"""What ptxas says of every CUDA kernel: registers, shared memory, stack and spills.

python -m engine.cuda_resources FILE.ptxas … --output results/build/cuda/resources.json

Exit status 1, and no file, if a kernel spills or if its static shared memory does not fit a block of sm_120 (dynamic
shared memory is held to that limit by static_assert beside the kernels).
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from reference.files import write_text

MAX_SHARED_BYTES = {"sm_120a": 101_376, "sm_90a": 232_448}
KERNEL = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
SHARED = re.compile(r"(\d+) bytes smem")


def kernels(text: str, unit: str) -> list[dict]:
    """One record a kernel and architecture."""
    records = []
    for match in KERNEL.finditer(text):
        shared = SHARED.search(match["rest"])
        records.append(
            {
                "unit": unit,
                "kernel": match["kernel"],
                "arch": match["arch"],
                "registers": int(match["registers"]),
                "shared_bytes": int(shared[1]) if shared else 0,
                "stack_bytes": int(match["stack"]),
                "spill_bytes": int(match["stores"]) + int(match["loads"]),
            }
        )
    return records


def faults(records: list[dict]) -> list[str]:
    found = []
    for record in records:
        where = f"error: {record['unit']}: {record['kernel']} ({record['arch']})"
        limit = MAX_SHARED_BYTES[record["arch"]]
        if record["spill_bytes"]:
            found.append(f"{where}: spills: {record['spill_bytes']} bytes: registers must suffice")
        if record["shared_bytes"] > limit:
            found.append(f"{where}: shared memory: {record['shared_bytes']} bytes: a block has {limit}")
    return found


def demangled(records: list[dict]) -> list[dict]:
    """With the kernels' C++ names, where c++filt is there to tell them."""
    try:
        names = "\n".join(record["kernel"] for record in records)
        lines = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True).stdout.splitlines()
    except OSError:
        return records
    return [record | {"kernel": line} for record, line in zip(records, lines, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="what `nvcc -Xptxas -v` printed, one file a unit")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    records = demangled([record for file in args.files for record in kernels(file.read_text(), file.stem)])
    if not records:
        print("error: no kernel in these files: was -Xptxas -v given?", file=sys.stderr)
        return 1
    if found := faults(records):
        print("\n".join(found), file=sys.stderr)
        return 1
    for arch in MAX_SHARED_BYTES:
        mine = [record for record in records if record["arch"] == arch]
        print(f"{arch}: {len(mine)} kernels, at most {max(r['registers'] for r in mine)} registers, no spills")
    write_text(args.output, json.dumps({"kernels": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
