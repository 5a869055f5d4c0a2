"""Copies of the repository: built once, and from there a copy a test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from driver import VERDICTS, Ladder, copy_sources


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Ladder:
    """Two verdicts, made once; copy before editing."""
    ladder = copy_sources(tmp_path_factory.mktemp("built") / "copy")
    ladder.run(*VERDICTS)
    return ladder


@pytest.fixture
def ladder(built, tmp_path) -> Ladder:
    """A copy of `built`, `.snakemake` and times included, to edit and to drive again."""
    shutil.copytree(built.root, tmp_path / "copy")
    yield Ladder(tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")


@pytest.fixture
def fresh(tmp_path) -> Ladder:
    """A clean copy for `./ladder`, with this interpreter's packages standing in for the ones it would install."""
    ladder = copy_sources(tmp_path / "copy")
    venv = ladder.root / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(sys.executable)
    (venv / "lib").symlink_to(Path(sys.prefix) / "lib")
    (venv / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    installed = "cat envs/requirements.txt envs/constraints.txt | sha256sum >.venv/requirements.sha256"
    subprocess.run(installed, shell=True, cwd=ladder.root, check=True)
    yield ladder
    shutil.rmtree(ladder.root)
