"""The list of CUDA mutations fits the sources, and its command line says what is wrong in one line."""

import sys

import pytest

from tests.cuda import mutations


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_text_stands_in_its_file(mutation):
    texts = {}
    for file, old, new in mutation.edits:
        path = mutations.REPOSITORY / mutations.OPS / file
        text = texts.get(path, path.read_text())
        assert old in text and old != new
        texts[path] = text.replace(old, new)
    assert mutation.edits and (mutations.REPOSITORY / mutations.OPS / mutation.operator / "cuda.cu").exists()


def test_names_are_different():
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "no such"], "--only: no such: no mutation to try on emulated threads has it in its name"),
        (["--jobs", "0"], "--jobs: 0: must be at least 1"),
        ([], "holds no build"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    output = tmp_path / "record.json"
    command = ["mutations", "--build", tmp_path, "--output", output, "--emulate", *arguments]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    with pytest.raises(SystemExit) as end:
        mutations.main()
    assert end.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
    assert not output.exists()
