"""Files: written whole or not at all; JSON that is read names its file where it is damaged."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name when the body ends well. Makes the folder; an OSError names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # an orphan of a killed run writes to its own
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, path)
    except OSError as error:  # a full disk does not say which file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made
            part.unlink()


def read_json(path: Path):
    """Raises ValueError naming the file if it is no JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}: no JSON: damaged, or another kind of file") from None


def write_text(path: Path, text: str) -> None:
    """Writes `text` in UTF-8."""
    with whole(path) as file:
        file.write(text.encode())
