"""How fast a checkpoint loads, beside reading its files from end to end: results/bench/load.json.

python -m engine.bench_load --library LIB --checkpoint DIR --output FILE [--rounds N]

Every round drops the files from the page cache and reads them, drops them and loads them: a round's ratio compares
like with like on a disk whose speed varies. Peak memory is what loading adds, beside the engine's own weights and the
largest tensor.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from engine.checkpoint import open_checkpoint
from engine.native import Engine
from reference.files import write_text

PIECE_BYTES = 16 << 20


def drop(files: list[Path]) -> None:
    """From the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_seconds(files: list[Path]) -> float:
    piece, begin = bytearray(PIECE_BYTES), time.perf_counter()
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(piece):
                pass
    return time.perf_counter() - begin


def load_seconds(library: str, folder: Path) -> float:
    begin = time.perf_counter()
    with Engine(library, open_checkpoint(folder), context=64):
        return time.perf_counter() - begin


def peak_bytes() -> int:
    """The most memory this process has had at once, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    files = sorted(args.checkpoint.glob("*.safetensors"))
    n_bytes, checkpoint = sum(file.stat().st_size for file in files), open_checkpoint(args.checkpoint)
    weights, largest = checkpoint.n_bytes, max(tensor.n_bytes for tensor in checkpoint.tensors.values())
    before, rounds = peak_bytes(), []
    for _ in range(args.rounds):
        drop(files)
        read = read_seconds(files)
        drop(files)
        rounds.append((n_bytes / read / 1e9, n_bytes / load_seconds(args.library, args.checkpoint) / 1e9))
        print(f"read {rounds[-1][0]:.2f} GB/s, load {rounds[-1][1]:.2f} GB/s", flush=True)
    result = {
        "bytes": n_bytes,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rounds": [{"read_gb_s": round(read, 3), "load_gb_s": round(load, 3)} for read, load in rounds],
        "ratio": round(statistics.median(load / read for read, load in rounds), 3),
        "peak_beside_weights_and_a_tensor": peak_bytes() - before - weights - largest,
    }
    write_text(args.output, json.dumps(result, indent=1) + "\n")
    print(f"load / read: {result['ratio']}")


if __name__ == "__main__":
    main()
