"""The sanitized libraries, as the ladder builds them."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def sanitized() -> Callable[[str], Path]:
    """Flavour -> its folder: libkdtree_cpu.so, and build/ with the objects."""

    @cache
    def build(flavour: str) -> Path:
        target = f"results/sanitize/{flavour}/libkdtree_cpu.so"
        command = [sys.executable, "-m", "snakemake", "--cores", "2", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return (ROOT / target).parent

    return build
