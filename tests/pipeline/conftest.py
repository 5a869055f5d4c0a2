"""Copies of the repository: built once, and from there a copy a test."""

import shutil

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
    """A clean copy for `./ladder`."""
    ladder = copy_sources(tmp_path / "copy")
    ladder.install()
    yield ladder
    shutil.rmtree(ladder.root, ignore_errors=True)  # a killed call's jobs may still write
