"""What goes wrong around a GPU: one line that says what was asked and what there is, an exit status, no file, no hang.

    python -m tests.cuda.faults --build results/build/on_gpu --bundle FILE --golden FILE --output FILE [--arch 90a]

Needs the objects and the library that on_gpu.sh builds. The record counts, for each fault, 1 if it ended otherwise.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.cuda.mutations import REPOSITORY, mutated_tree

SECONDS = 60
SHARED = ("cuda/operator.cuh", "kMaxSharedBytes = 101376", "kMaxSharedBytes = 999424")
# A kernel that traps leaves the GPU of its process unusable, which is what a lost GPU looks like from here.
TRAP = ("tree_accept/cuda.cu", "max(before.limit - before.generated, 1)",
        "(before.generated > 3 ? (__trap(), 1) : max(before.limit - before.generated, 1))")
HOLD_ALL_MEMORY = """
import ctypes, runpy, sys
library = ctypes.CDLL(sys.argv[sys.argv.index("--library") + 1])
library.kdtree_allocate.restype = ctypes.c_void_p
assert not library.kdtree_init()
for shift in (30, 26, 21):
    while library.kdtree_allocate(ctypes.c_size_t(1 << shift)):
        pass
runpy.run_module("engine.run", run_name="__main__")
"""


@dataclass(frozen=True)
class Fault:
    """A run of the engine that must end in one line with `message`."""

    name: str
    message: str
    environment: dict = field(default_factory=dict)
    program: tuple[str, ...] = ("-m", "engine.run")
    edits: tuple[tuple[str, str, str], ...] = ()  # (file below engine/ops, text, replacement)
    rebuilt: tuple[str, ...] = ()  # sources below engine
    arch: str | None = None


FAULTS = [
    Fault("no_gpu", r"no usable GPU: .* CUDA \d+\.\d", environment={"CUDA_VISIBLE_DEVICES": ""}),
    Fault("unknown_rung", "KDTREE_CUDA: fast: must be plain or stream", environment={"KDTREE_CUDA": "fast"}),
    Fault("no_memory", r"\d+ bytes: out of memory, \d+ are free", program=("-c", HOLD_ALL_MEMORY)),
    Fault("no_code_for_this_gpu", r"compute capability \d+\.\d, for which this library holds no code",
          rebuilt=("backend/cuda/backend.cu",), arch="75"),
    Fault("too_much_shared_memory", r"refuses 999424 bytes of shared memory a block, it offers \d+",
          edits=(SHARED,), rebuilt=("backend/cuda/backend.cu", "ops/tree_attention/cuda.cu")),
    Fault("lost_mid_run", "unspecified launch failure", edits=(TRAP,), rebuilt=("ops/tree_accept/cuda.cu",)),
]


def object_of(source: str) -> str:
    """The stem of the object that on_gpu.sh makes of a source below engine."""
    path = Path(source)
    return path.parent.name if path.parent.parent.name == "ops" else path.name


def built(fault: Fault, options: argparse.Namespace, work: Path) -> Path:
    """The library under test."""
    if not fault.rebuilt:
        return options.build.resolve() / "libkdtree_cuda.so"
    mutated_tree(fault.edits, work)
    arch, library = fault.arch or options.arch, work / "libkdtree_cuda.so"
    objects = []
    for i, source in enumerate(fault.rebuilt):
        objects.append(work / f"{i}.o")
        subprocess.run(["nvcc", "-std=c++17", "-O3", "--fmad=false", "-DNDEBUG", "-Xcompiler", "-fPIC", "-gencode",
                        f"arch=compute_{arch},code=sm_{arch}", "-c", work / "engine" / source, "-o", objects[-1]],
                       check=True)
    replaced = {object_of(source) for source in fault.rebuilt}
    every = [*options.build.glob("*.o"), *options.build.glob("backend/*.o")]
    others = [path.resolve() for path in every if path.stem not in replaced]
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fopenmp", "-o", library, *objects, *others], check=True)
    return library


def provoke(fault: Fault, options: argparse.Namespace, work: Path) -> str | None:
    """None if it ends as it must, else how it ended."""
    output = work / "run.safetensors"
    arguments = ["--library", built(fault, options, work), "--bundle", options.bundle.resolve(), "--golden",
                 options.golden.resolve(), "--mode", "ar", "--block-size", "8", "--max-new-tokens", "24",
                 "--output", output]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | fault.environment
    try:
        done = subprocess.run([sys.executable, *fault.program, *arguments], capture_output=True, text=True,
                              timeout=SECONDS, env=environment, cwd=work)
    except subprocess.TimeoutExpired:
        return "no end"
    lines = done.stderr.splitlines()
    if output.exists():
        return "left a run"
    if done.returncode == 0 or len(lines) != 1 or not re.match(rf"error: .*({fault.message})", lines[0]):
        return f"status {done.returncode}: {done.stderr.strip()[-300:]}"
    print(f"{fault.name:24} {lines[0]}", flush=True)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--build", "--bundle", "--golden", "--output"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--arch", default="90a")
    options = parser.parse_args()

    def judge(fault: Fault) -> dict:
        with tempfile.TemporaryDirectory() as work:
            ended = provoke(fault, options, Path(work))
        if ended:
            print(f"{fault.name:24} ENDED OTHERWISE: {ended}", flush=True)
        return {"name": fault.name, "max_abs_error": float(ended is not None), "budget": 0.0, "message": ended or ""}

    alone = [fault for fault in FAULTS if fault.name == "no_memory"]  # while it holds all memory no other can run
    with ThreadPoolExecutor() as pool:
        cases = list(pool.map(judge, [fault for fault in FAULTS if fault not in alone]))
    cases += map(judge, alone)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    record = {"operator": "faults", "backend": "cuda", "cases": cases}
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
