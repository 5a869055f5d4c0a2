from pathlib import Path

import pytest

import engine
from engine.native import Drafter
from tests.checkpoint import release
from tests.text import folders


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """The synthetic release, with a tokenizer and a chat template."""
    folder = release.write(tmp_path_factory.mktemp("release") / "model")
    return folders.write_json_tokenizer(folder)


@pytest.fixture(scope="session")
def model(checkpoint, library_path):
    with engine.Engine(checkpoint, library=library_path, context=512, drafter=Drafter("noisy", 0.3)) as opened:
        yield opened
