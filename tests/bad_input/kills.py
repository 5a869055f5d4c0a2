"""Kills ./ladder at random moments, again and again, and holds what the next call makes against a run that was let be.

python -m tests.bad_input.kills [--kills N] [--seed S] --output FILE

SIGKILL goes to the whole process group or, every second time, to the parent alone, whose children write on as orphans.
The file is `{kills: [{after: seconds, what was there}], recovered: true}`; nothing is written, and exit status 1, if a
file differs in the end.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from reference.files import write_text
from tests.fuzz.models import GROUPED
from tests.pipeline.driver import Ladder, copy_sources

MODEL = GROUPED | {"vocab_size": 64, "hidden_size": 64, "n_group": 1, "topk_group": 1}
CONFIG = {
    "models": {"small": MODEL},
    "bundles": {"small_int4": {"model": "small", "quant": {"bits": 4, "group_size": 32}}},
    "decode": {
        "prompts": [{"name": "ids", "tokens": [1, 2, 3]}, {"name": "more", "tokens": [9, 8]}],
        "max_new_tokens": 24,
        "block_size": 4,
        "tree_budget": 6,
    },
}
MADE = (
    "bundles/*.safetensors",
    "golden/*.safetensors",
    "runs/*/*.safetensors",
    "checks/*/*.json",
    "build/*/*.so",
    "*.pass",
)


def prepare(folder: Path) -> Ladder:
    """A copy of the repository with one small model and kernels that compile quickly."""
    ladder = copy_sources(folder)
    ladder.replace("rules/common.smk", "-std=c++17 -O3 -fPIC", "-std=c++17 -O0 -fPIC")
    (ladder.root / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    ladder.install()
    return ladder


def made(ladder: Ladder) -> dict[str, str]:
    """File -> digest, of everything that a later stage takes for good."""
    results = ladder.root / "results"
    files = sorted(file for pattern in MADE for file in results.glob(pattern))
    return {str(file.relative_to(results)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def start(ladder: Ladder, targets: list[str], output) -> subprocess.Popen:
    command = ["./ladder", "--cores", "2", *targets]
    return subprocess.Popen(command, cwd=ladder.root, start_new_session=True, stdout=output, stderr=output)


def climb(ladder: Ladder, targets: list[str]) -> float:
    """Runs the command to its end; seconds. Raises RuntimeError with its output if it fails."""
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        if start(ladder, targets, output).wait():
            output.seek(0)
            raise RuntimeError(output.read()[-4000:])
    return time.monotonic() - begin


def kill_again_and_again(folder: Path, targets: list[str], kills: int, seed: int) -> list[dict]:
    """`kills` calls killed at random moments, then one that is let be. Raises RuntimeError if that fails, or if a file
    differs from those of a run without any kill. A ladder that is climbed before its turn to be killed starts anew."""
    whole, ladder, rng = prepare(folder / "whole"), prepare(folder / "killed"), random.Random(seed)
    seconds = climb(whole, targets)
    expected, record = made(whole), []
    while len(record) < kills:
        with tempfile.TemporaryFile("w+") as output:
            process = start(ladder, targets, output)
            after = rng.uniform(0, seconds)
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                if len(record) % 2:
                    process.kill()
                else:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                record.append({"after": round(after, 2), "files": len(made(ladder))})
                continue
            if process.returncode:
                output.seek(0)
                raise RuntimeError(f"after {len(record)} kills: {output.read()[-4000:]}")
        compare(made(ladder), expected, f"after {len(record)} kills")
        shutil.rmtree(ladder.root / "results")
        shutil.rmtree(ladder.root / ".snakemake")
    climb(ladder, targets)
    compare(made(ladder), expected, f"after {kills} kills")
    return record


def compare(have: dict[str, str], want: dict[str, str], when: str) -> None:
    for file in sorted(have.keys() | want.keys()):
        if have.get(file) != want.get(file):
            raise RuntimeError(f"results/{file}: {have.get(file)}: {when}; without them it is {want.get(file)}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bad_input.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # orphans may still write
        try:
            record = kill_again_and_again(Path(folder), ["results/small_int4.pass"], args.kills, args.seed)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    write_text(args.output, json.dumps({"kills": record, "recovered": True}, indent=1) + "\n")
    print(f"killed {args.kills} times, and recovered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
