"""Compiles the extension of one backend; it must lie beside the backend's library, which it is linked with.

    python -m engine.torch_ops.build --library results/build/cpu/libkdtree_cpu.so \
        --output results/build/cpu/libkdtree_torch_cpu.so
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
TARGET_VERSION = "0x020b000000000000"  # torch 2.11: newer calls do not compile, newer versions load the result


def command(library: Path, output: Path) -> list[str]:
    """The compiler's call. The backend is that of the library's name, lib<name>_<backend>.so."""
    backend = library.stem.rpartition("_")[2]
    sources = ["binding.cpp", *(["schemas.cpp"] if backend == "cpu" else [])]
    define, link = (["-DUSE_CUDA"], ["-ltorch_cuda"]) if backend == "cuda" else ([], [])
    folder = Path(torch.__file__).parent
    return [
        *("g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-DNDEBUG", "-Wall", "-Wextra"),
        f"-DTORCH_TARGET_VERSION={TARGET_VERSION}",
        f"-DKDTREE_TORCH_KEY={backend.upper()}",
        *define,
        *("-isystem", str(folder / "include")),
        *(str(SOURCES / source) for source in sources),
        *("-o", str(output)),
        *(f"-L{library.parent}", f"-l{library.stem.removeprefix('lib')}"),
        *(f"-L{folder / 'lib'}", "-ltorch_cpu", *link, "-Wl,--no-undefined", "-Wl,-rpath,$ORIGIN"),
    ]


def build(library: Path, output: Path) -> None:
    """Raises subprocess.CalledProcessError if the compiler fails."""
    part = output.with_name(f".{output.name}.{os.getpid()}")
    subprocess.run(command(library, part), check=True)
    part.replace(output)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.torch_ops.build", description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    build(options.library, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
