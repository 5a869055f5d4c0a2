"""A sanitized library with one fault in it."""

import shutil
import subprocess
from pathlib import Path

from engine.sanitize import FLAVOURS, compile_flags

ROOT = Path(__file__).resolve().parents[2]
RELEASE_FLAGS = "-std=c++17 -O3 -fPIC -fopenmp -ffp-contract=off -DNDEBUG -Wno-psabi"


def plant_fault(sanitized: Path, tmp_path: Path, file: str, old: str, new: str) -> Path:
    """Compiles `file` with `old`, which stands there once, replaced by `new`, and links it with the other objects of
    the folder results/sanitize/<flavour>."""
    shutil.copytree(ROOT / "engine", tmp_path / "engine", ignore=shutil.ignore_patterns("*.py", "*.cu*", "__pycache__"))
    source = tmp_path / file
    text = source.read_text()
    assert text.count(old) == 1, f"{file}: {text.count(old)} times {old!r}"
    source.write_text(text.replace(old, new))
    flavour, planted, library = sanitized.name, tmp_path / "planted.o", tmp_path / "libkdtree_cpu.so"
    parts = Path(file).parts  # engine/ops/<op>/cpu.cpp or engine/core/<unit>.cpp
    compiler = [ROOT / "engine/ops/cpu/compile.sh"] if parts[1] == "ops" else ["g++", "-c", "-o"]
    subprocess.run([*compiler, planted, source, *compile_flags(RELEASE_FLAGS, flavour).split()], check=True)
    replaced = f"{parts[2]}.o" if parts[1] == "ops" else f"{parts[1]}/{source.stem}.o"
    objects = [o for o in (sanitized / "build").rglob("*.o") if str(o.relative_to(sanitized / "build")) != replaced]
    link = ["g++", "-shared", *FLAVOURS[flavour].split(), "-Wl,-Bsymbolic"]
    subprocess.run([*link, *objects, planted, "-o", library], check=True)
    return library
