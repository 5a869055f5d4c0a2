import shutil
from pathlib import Path

import pytest

from tests.checkpoint import release


@pytest.fixture(scope="session")
def bundle():
    return release.make_bundle()


@pytest.fixture(scope="session")
def pristine(tmp_path_factory, bundle) -> Path:
    """A release that nobody may change."""
    return release.write(tmp_path_factory.mktemp("release") / "model", bundle)


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))
