"""The native library under test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.operators import Library

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def library_path() -> Path:
    """The CPU library as the ladder builds it, or the one that KDTREE_LIBRARY names (any backend's)."""
    if given := os.environ.get("KDTREE_LIBRARY"):
        return Path(given).resolve()
    target = "results/build/cpu/libkdtree_cpu.so"
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "2", target], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return ROOT / target


@pytest.fixture(scope="session")
def library(library_path) -> Library:
    return Library(library_path)
