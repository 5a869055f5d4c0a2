"""Command lines run in this process, and a small bundle to break."""

import json
import runpy
import sys
from collections.abc import Callable

import pytest

from reference.quantize import quantize_bundle
from reference.weights import generate_bundle
from tests.fuzz.models import GROUPED, File, as_file


@pytest.fixture
def fails(monkeypatch, capsys) -> Callable[..., str]:
    """Runs `python -m <module> <arguments>` to its failure: exit status 2, nothing on stdout, and on stderr one
    printable line, which is returned without its `error: `."""

    def run(module: str, *arguments: object) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["python -m " + module, *map(str, arguments)])
        monkeypatch.delitem(sys.modules, f"{module}.__main__" if module == "engine" else module, raising=False)
        with pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        out, err = capsys.readouterr()
        assert end.value.code == 2, err
        assert out == ""
        assert err.startswith("error: ") and err.endswith("\n") and err[:-1].isprintable(), err
        return err[:-1].removeprefix("error: ")

    return run


@pytest.fixture(scope="session")
def float_file() -> File:
    return as_file(generate_bundle(GROUPED, "float32"))


@pytest.fixture(scope="session")
def int4_file() -> File:
    return as_file(quantize_bundle(generate_bundle(GROUPED, "bfloat16"), 32))


@pytest.fixture
def write(tmp_path) -> Callable[..., str]:
    """Writes a File, or its bytes, to a path that is returned."""

    def to_disk(content: File | bytes, name: str = "bundle.safetensors") -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.bytes())
        return str(path)

    return to_disk


@pytest.fixture
def bundle(write, float_file) -> str:
    """A sound one."""
    return write(float_file)


def with_config(file: File, **changes: object) -> File:
    """The file with other fields in its config; None removes a field."""
    made = file.copy()
    fields = json.loads(made.metadata["config"]) | changes
    made.metadata["config"] = json.dumps({name: value for name, value in fields.items() if value is not None})
    return made
