"""Feeds mutated bundles, configs and arguments to the loader and the engine under AddressSanitizer and
UndefinedBehaviorSanitizer.

python -m tests.fuzz --library LIB [--cases N] [--first N] [--seed S] [--workers N] [--output FILE]

LIB is the library of flavour `address`. A case depends on its number and the seed only, so that
`--first 1234 --cases 1` replays one. The file is `{seed, cases, outcomes: {kind: {outcome: count}}, failures}`; exit
status 1 if anything crashed, hung, escaped as an exception or was refused in the wrong form.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path

from engine.sanitize import environment, python
from reference.files import write_text

SECONDS = 60  # of one case, before it counts as a hang
OPTIONS = ":max_allocation_size_mb=256:quarantine_size_mb=16"


class Supervisor:
    """Runs the cases in worker processes; a worker that dies or hangs is a failure of its case, and is replaced."""

    def __init__(self, library: Path, seed: int, seconds: float = SECONDS):
        self.library, self.seed, self.seconds = library, seed, seconds
        self.outcomes: dict[str, Counter] = defaultdict(Counter)
        self.failures: list[dict] = []
        self.lock = threading.Lock()

    def run(self, numbers: range) -> None:
        while numbers:
            numbers = numbers[self._worker(numbers) :]

    def _worker(self, numbers: range) -> int:
        """Runs one process until it ends; how many cases it did."""
        variables = environment("address")
        variables["ASAN_OPTIONS"] += OPTIONS
        arguments = [self.library, self.seed, numbers.start, numbers.stop, numbers.step]
        done, hung = 0, threading.Event()
        with tempfile.TemporaryFile("w+") as errors:
            command = python("address", "-m", "tests.fuzz.worker", *map(str, arguments))
            process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True)

            def give_up():
                hung.set()
                process.kill()

            while True:
                timer = threading.Timer(self.seconds, give_up)
                timer.start()
                line = process.stdout.readline()
                timer.cancel()
                if not line.endswith("\n"):
                    break
                done += 1
                self._count(json.loads(line))
            process.wait()
            if done == len(numbers):
                return done
            errors.seek(0)
            what = f"no end after {self.seconds} s" if hung.is_set() else f"exit status {process.returncode}"
            with self.lock:
                self.failures.append({"case": numbers[done], "what": what, "detail": errors.read()[-6000:]})
            return done + 1

    def _count(self, result: dict) -> None:
        with self.lock:
            self.outcomes[result["kind"]][result["outcome"]] += 1
            if "detail" in result:
                self.failures.append({"case": result["case"], "what": result["outcome"], "detail": result["detail"]})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, type=Path)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not args.library.is_file():
        parser.error(f"--library: {args.library}: no such file")
    supervisor = Supervisor(args.library, args.seed)
    last = args.first + args.cases
    threads = [
        threading.Thread(target=supervisor.run, args=[range(args.first + worker, last, args.workers)])
        for worker in range(args.workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = sorted(supervisor.failures, key=lambda failure: failure["case"])
    for failure in failures:
        print(f"error: case {failure['case']}: {failure['what']}: {failure['detail']}", file=sys.stderr)
    outcomes = {kind: dict(sorted(counts.items())) for kind, counts in sorted(supervisor.outcomes.items())}
    print(f"fuzz: {args.cases} cases, {len(failures)} failures: {json.dumps(outcomes)}")
    if args.output and not failures:
        content = {"seed": args.seed, "cases": args.cases, "outcomes": outcomes, "failures": failures}
        write_text(args.output, json.dumps(content, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
