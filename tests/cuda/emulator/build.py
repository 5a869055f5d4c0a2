"""CUDA sources as plain C++, compiled for the emulated threads of cuda_runtime.h beside this file."""

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
# A GPU refuses words at odd addresses; so does this.
ALIGNED = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]
LAUNCH = re.compile(r"([\w:]+(?:<[^;<>]*(?:<[^;<>]*>)?[^;<>]*>)?)<<<(.*?)>>>\s*\((.*?)\);", re.DOTALL)
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def translate(source: str) -> str:
    """CUDA's launches and dynamic shared memory in plain C++."""
    source = DYNAMIC.sub(r"auto* const \2 = reinterpret_cast<\1*>(emulator::dynamic_shared);", source)
    return LAUNCH.sub(r"emulator::launch(\2, [=] { \1(\3); });", source)


def translate_tree(engine: Path, to: Path) -> None:
    """Writes the translated sources of the folder `engine` below `to`, beside the headers that they include."""
    for path in engine.rglob("*"):
        if path.suffix in (".h", ".cuh", ".cu"):
            target = to / path.relative_to(engine)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(translate(path.read_text()))


def compile_kernels(source: Path, to: Path, *flags: str) -> None:
    subprocess.run(["g++", *FLAGS, *ALIGNED, *flags, "-include", "cuda_runtime.h", f"-I{HERE}", "-x", "c++",
                    "-c", source, "-o", to], check=True)


def compile_host(source: Path, to: Path) -> None:
    subprocess.run(["g++", *FLAGS, f"-I{HERE}", "-c", source, "-o", to], check=True)


def link(objects: list[Path], library: Path) -> None:
    subprocess.run(["g++", "-shared", "-fopenmp", *ALIGNED, "-Wl,--no-undefined", "-o", library, *objects], check=True)
