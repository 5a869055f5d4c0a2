"""How fast the CPU kernels are: results/bench/cpu.json.

python -m engine.bench_cpu --library LIB --read-library LIB --output FILE [--only operators|decode] [--rounds N]

INT4 products at the shapes of Kimi K2.6 on weights that lie in memory, on every path this CPU has, against torch's
bf16 INT4 product, and beside what reading memory costs, all in turn in one process; and a whole model against
transformers.
"""

import argparse
import ctypes
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from engine.bench_cpu.subjects import PATHS, Experts, Gemm, operator_on
from engine.bench_cpu.timing import Times, interleaved
from engine.operators import Library
from reference.files import write_text

ROWS = (1, 4, 8, 16)
COLD_BYTES = 256 << 20  # of weights in turn: several times the caches
READ_BYTES = 64 << 20  # of one reading


def reader(path: Path, threads: int) -> list:
    """Functions that read READ_BYTES each of a buffer of COLD_BYTES."""
    read = ctypes.CDLL(str(path.resolve())).read_lines
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    memory = np.ones(COLD_BYTES // 8, np.int64)

    def part(i):
        return lambda: read(memory.ctypes.data + i * READ_BYTES, READ_BYTES // 128, threads)

    return [part(i) for i in range(COLD_BYTES // READ_BYTES)]


def disagreement(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def gb_s(n_bytes: int, times: Times) -> float:
    """By the wall clock."""
    return round(n_bytes / times.milliseconds()["wall_ms"] / 1e6, 1)


def measure_operator(library: Library, work, read_library: Path, rounds: int) -> list[dict]:
    """Every number of rows, with one thread and with all."""
    operators = {path: operator_on(library, path, work.operator) for path in PATHS}
    subjects = {path: work.ours(operator) for path, operator in operators.items() if operator}
    subjects["torch"] = work.torchs()
    cases = []
    for threads in sorted({1, os.cpu_count()}):
        torch.set_num_threads(threads)
        with library.threads(threads):
            for rows in ROWS:
                inputs = work.inputs(rows)
                bound = {name: subject.bind(inputs) for name, subject in subjects.items()}
                calls = {name: calls for name, (calls, _) in bound.items()}
                times = interleaved(calls | {"read": reader(read_library, threads)}, rounds)
                n_bytes, want = work.n_bytes(inputs), bound["torch"][1]()
                case = {
                    "operator": work.operator,
                    "shape": work.name,
                    "rows": rows,
                    "threads": threads,
                    "bytes": n_bytes,
                    "read_gb_s": gb_s(READ_BYTES, times["read"]),
                    "subjects": {
                        name: times[name].milliseconds()
                        | {
                            "gb_s": gb_s(n_bytes, times[name]),
                            "torch_ratio": times[name].ratios(times["torch"]),
                            "read_fraction": times[name].ratios(times["read"], n_bytes / READ_BYTES),
                            "disagreement": round(disagreement(bound[name][1](), want), 4),
                        }
                        for name in subjects
                    },
                }
                print(json.dumps(case), flush=True)
                cases.append(case)
    for subject in subjects.values():
        subject.close()
    return cases


def copies(n: int, k: int) -> int:
    return -(-COLD_BYTES // (n * k // 2))


def machine() -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": models[0] if models else platform.processor(), "cores": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--read-library", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", choices=("operators", "decode"))
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()

    results = {
        "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_before": os.getloadavg()[0],
        "operators": [],
        "decode": [],
    }
    if args.only != "decode":
        library = Library(args.library)
        for work in (
            Gemm(4096, 7168, max(ROWS), copies(4096, 7168)),
            Gemm(7168, 2048, max(ROWS), copies(7168, 2048)),
            Experts(7168, 2048, n_experts=24, top_k=8, max_rows=max(ROWS)),
        ):
            results["operators"] += measure_operator(library, work, args.read_library, args.rounds)
    if args.only != "operators":
        from engine.bench_cpu import decode  # transformers takes seconds to import

        results["decode"] = decode.measure(args.library, os.cpu_count(), rounds=max(3, args.rounds // 3), count=16)
    results["load_after"] = os.getloadavg()[0]
    write_text(args.output, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
