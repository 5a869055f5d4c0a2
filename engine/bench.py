"""What the ladder costs, in a scratch copy: results/bench/ladder.json {clean_s, edit_int4_s, noop_s}.

clean_s      clean tree -> all verdicts, installs excluded
edit_int4_s  edit of the INT4 GEMM's CPU kernel -> new verdict of a quantised bundle
noop_s       the same call with nothing to do

python -m engine.bench --cores N --bundle NAME --output FILE
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reference.files import write_text

KERNEL = "engine/ops/w4a16_gemm/cpu.cpp"
EDIT = 'extern "C" const int kdtree_edited = 1;\n'  # a new symbol: the object changes, its arithmetic does not


def snakemake(folder: Path, cores: int, *targets: str) -> float:
    """Wall-clock seconds of one call. Raises SystemExit with its output if it fails."""
    command = [sys.executable, "-m", "snakemake", "--cores", str(cores), *targets]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    return round(time.perf_counter() - start, 2)


def scratch_copy(folder: Path) -> None:
    ignored = shutil.ignore_patterns(".*", "results", "__pycache__")
    shutil.copytree(Path(), folder, dirs_exist_ok=True, ignore=ignored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--bundle", required=True, help="a quantised bundle")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    verdict = f"results/{args.bundle}.pass"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        scratch_copy(folder)
        times = {"clean_s": snakemake(folder, args.cores)}
        with open(folder / KERNEL, "a") as kernel:
            kernel.write(EDIT)
        times["edit_int4_s"] = snakemake(folder, args.cores, verdict)
        times["noop_s"] = snakemake(folder, args.cores, verdict)
    write_text(args.output, json.dumps(times | {"cpus": os.cpu_count()}, indent=2) + "\n")
    print(times)


if __name__ == "__main__":
    main()
