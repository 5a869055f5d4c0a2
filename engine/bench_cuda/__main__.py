"""How fast the CUDA kernels are, beside their peers and beside reading memory: results/bench/cuda.json.

python -m engine.bench_cuda --library LIB --probes LIB --output FILE [--only experts|dense|float] [--rows N,N]

INT4 experts and linear layers and bf16 linear layers at the shapes of Kimi K2, on weights that lie in memory; Humming
(if it is installed), torch's tinygemm and cuBLAS on the same weights in the same process. Floor: the bytes that must be
read, at the rate of a kernel that only reads.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.bench_cuda import humming
from engine.bench_cuda.subjects import MAX_ROWS, Case, Dense, Experts, Float, Probes, Product, Sizes, one_line
from engine.bench_cuda.timing import Replay, Sensors, interleaved, passes
from engine.operators import Library, OperatorError
from reference.files import write_text

ROWS = {"experts": [1, 2, 4, 8, 16, 32, 64], "dense": [1, 4, 8, 16, 32, 64], "float": [1, 8, 32, 64]}
DENSE = [(4096, 7168), (7168, 2048)]  # outputs, inputs
FLOAT = [(1536, 7168), (12288, 1536), (576, 7168), (7168, 8192), (163840, 7168)]  # q_a, q_b, kv_a, o, lm_head
READ_BYTES = 4 << 30
LIMIT = 0.02  # a relative error above this is no rounding


def works(part: str, rows: list[int], library: Library, probes: Probes, peer: bool) -> Iterator[Callable]:
    """What makes the works of a part, one after the other, so that one's memory goes before the next comes."""
    if part == "experts":
        yield lambda: Experts(library, probes, Sizes(), lambda layer: humming.experts(layer, rows) if peer else {})
    elif part == "dense":
        for n, k in DENSE:
            yield lambda n=n, k=k: Dense(library, n, k, lambda product: humming.dense(product, rows) if peer else {})
    else:
        for n, k in FLOAT:
            yield lambda n=n, k=k: Float(library, n, k)


class Bench:
    """Measures cases; `read_gb_s` is the read rate that floors are made of."""

    def __init__(self, sensors: Sensors, rounds: int):
        self._sensors, self._rounds, self._stream = sensors, rounds, torch.cuda.Stream()
        self.read_gb_s = None

    def read_rate(self, probes: Probes) -> float:
        """GB/s."""
        call, n_bytes = probes.reader(READ_BYTES)
        times = interleaved({"read": Replay(self._stream, [call], 1).time}, self._rounds)
        return round(n_bytes / times["read"].p10 / 1e3, 1)

    def measured(self, work: Experts | Product, rows: list[int]) -> Iterator[dict]:
        """Every case of it."""
        for case in work.cases(rows):
            yield self.measure(case)
        work.close()

    def measure(self, case: Case) -> dict:
        """The case's record. A subject that fails or is wrong has an `error`; the others go on."""
        records, replays, floors = {}, {}, {}
        for name, make in case.make.items():
            try:
                subject = make()
                error = case.relative_error(subject.result())
                records[name] = {"relative_error": float(f"{error:.3g}")}
                if not error < LIMIT:
                    raise ArithmeticError(f"relative error {error}")
                replays[name] = Replay(self._stream, subject.calls, passes(len(subject.calls), subject.n_bytes))
                floors[name] = subject.n_bytes / self.read_gb_s / 1e3
            except Exception as error:
                records[name] = {"error": one_line(error)}
        spreads = interleaved({name: replay.time for name, replay in replays.items()}, self._rounds)
        for name, spread in spreads.items():
            records[name] |= {"us": spread.record(), "fraction": round(floors[name] / spread.median, 3)}
            records[name] |= replays[name].burst(spread.median, self._sensors)
        floor = round(case.n_bytes / self.read_gb_s / 1e3, 2)
        return {**case.labels, "bytes": round(case.n_bytes), "floor_us": floor, "subjects": records}


def told(case: dict) -> str:
    """A line."""
    what = [case["operator"], case["shape"], case.get("routing"), f"{case['rows']} rows", f"floor {case['floor_us']}"]
    subjects = []
    for name, s in case["subjects"].items():
        if "error" in s:
            subjects.append(f"{name} FAILED: {s['error']}")
        else:
            subjects.append(f"{name} {s['us']['median']} ({s['fraction']}) {s['sm_mhz']} MHz {s['watts']} W")
    return " ".join(filter(None, what)) + " us | " + " | ".join(subjects)


def without_folder(argument: str) -> str:
    """A path of this machine says nothing elsewhere: its last name stays."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> list[int]:
    """Of "1,8,64"; its name is in argparse's message."""
    return [int(number) for number in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench_cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--library", required=True)
    parser.add_argument("--probes", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--only", choices=list(ROWS))
    parser.add_argument("--rows", type=numbers, metavar="N,N")
    parser.add_argument("--rounds", type=int, default=43)
    args = parser.parse_args()
    if args.rows and not all(1 <= rows <= MAX_ROWS for rows in args.rows):
        parser.error(f"--rows: must lie in 1..{MAX_ROWS}")
    if args.rounds < 1:
        parser.error(f"--rounds: {args.rounds}: must be at least 1")
    return args


def main() -> int:
    args = parse()
    if not torch.cuda.is_available():
        print("error: engine.bench_cuda: torch sees no GPU", file=sys.stderr)
        return 2
    try:
        library = Library(args.library)
    except (OSError, OperatorError) as error:
        print(f"error: {args.library}: {error}", file=sys.stderr)
        return 2
    parts = [args.only] if args.only else list(ROWS)
    if "experts" in parts and library.variant_name.endswith("plain"):
        print("error: KDTREE_CUDA: experts are packed for the streaming kernels: leave it, or --only", file=sys.stderr)
        return 2
    try:
        probes = Probes(args.probes)
    except (OSError, RuntimeError) as error:
        print(f"error: --probes: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(1)
    sensors = Sensors()
    peer = reason = None
    try:
        peer = humming.version()
    except Exception as error:  # not installed, or its own needs are not met
        reason = one_line(error)
        print(f"humming: {reason}", flush=True)

    bench = Bench(sensors, args.rounds)
    bench.read_gb_s = bench.read_rate(probes)
    record = {
        "gpu": torch.cuda.get_device_name(),
        "driver": sensors.driver,
        "sensors_missing": sensors.reason,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": installed("triton")},
        "humming": peer,
        "humming_missing": reason,
        "variant": library.variant_name,
        "kdtree_cuda": os.environ.get("KDTREE_CUDA"),
        "command": shlex.join(["python", "-m", "engine.bench_cuda", *map(without_folder, sys.argv[1:])]),
        "rounds": args.rounds,
        "read_gb_s": bench.read_gb_s,
        "cases": [],
    }

    def save():  # after every case: what a broken driver ends is not lost
        write_text(args.output, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    print(f"{record['gpu']}, read {bench.read_gb_s} GB/s", flush=True)
    for part in parts:
        rows = args.rows or ROWS[part]
        for make in works(part, rows, library, probes, bool(peer)):
            for measured in bench.measured(make(), rows):
                record["cases"].append({"part": part, **measured})
                print(told(measured), flush=True)
                save()
            torch.cuda.empty_cache()
    record["read_gb_s_after"] = bench.read_rate(probes)
    save()
    wrong = [case for case in record["cases"] if any("error" in s for n, s in case["subjects"].items() if "ours" in n)]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
