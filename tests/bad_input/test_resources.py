"""A disk or a memory that gives out: one line, nothing half-written, and the same command goes on once it is there."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_input.kills import made, prepare
from tests.fuzz.models import GROUPED

ROOT = Path(__file__).resolve().parents[2]
CONFIG = json.dumps(GROUPED | {"vocab_size": 4000})  # half a megabyte of embedding
SMALL = json.dumps(GROUPED)


def mount(folder: Path, options: str) -> bool:
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True).returncode == 0


@pytest.fixture
def mounted(tmp_path):
    """Mounts a tmpfs with the options given; its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def do(options: str) -> Path:
        if os.geteuid() != 0 or not mount(folder, options):
            pytest.skip("needs a root that may mount")
        return folder

    yield do
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


def stage(module: str, *arguments: object, limits: dict | None = None, **options) -> subprocess.CompletedProcess:
    def restrict():
        for kind, value in (limits or {}).items():
            resource.setrlimit(kind, (value, value))

    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=restrict, **options)


def weights(output: Path, config: str = CONFIG, **options) -> subprocess.CompletedProcess:
    return stage("reference.weights", "--config", config, "--dtype", "float32", "--output", output, **options)


def check_failure(done: subprocess.CompletedProcess, expected: str) -> None:
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {expected}\n")


def test_read_only_mount(mounted):
    folder = mounted("ro")
    output = folder / "x.safetensors"
    check_failure(weights(output, SMALL), f"{output}: Read-only file system: cannot be read or written")
    nested = folder / "bundles/x.safetensors"
    check_failure(weights(nested, SMALL), f"{nested.parent}: Read-only file system: cannot be read or written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tmp_path):
    tmp_path.chmod(0o555)
    output = tmp_path / "x.safetensors"
    check_failure(weights(output, SMALL), f"{output}: Permission denied: cannot be read or written")
    tmp_path.chmod(0o755)


def test_full_disk(mounted):
    folder = mounted("size=256k")
    output = folder / "x.safetensors"
    check_failure(weights(output), f"{output}: No space left on device: cannot be read or written")
    assert not list(folder.iterdir())
    assert mount(folder, "remount,size=4m")
    assert weights(output).returncode == 0
    assert [file.name for file in folder.iterdir()] == ["x.safetensors"]


def test_full_disk_keeps_what_was_there(tmp_path):
    """As above with a limit on the size of a file, which needs no root; an earlier output stays whole."""
    output = tmp_path / "x.safetensors"
    assert weights(output, SMALL).returncode == 0
    before = output.read_bytes()
    done = weights(output, limits={resource.RLIMIT_FSIZE: 256 << 10})
    check_failure(done, f"{output}: File too large: cannot be read or written")
    assert output.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_run_on_a_full_disk(library_path, tmp_path):
    bundle, golden, run = tmp_path / "bundle", tmp_path / "golden", tmp_path / "run"
    assert weights(bundle).returncode == 0
    prompts = json.dumps([{"name": "a", "tokens": [1, 2]}])
    made = stage(
        "reference.golden", "--bundle", bundle, "--prompts", prompts, "--max-new-tokens", 4, "--output", golden
    )
    assert made.returncode == 0, made.stderr
    arguments = ["--library", library_path, "--bundle", bundle, "--golden", golden, "--mode", "ar", "--block-size", 4,
                 "--max-new-tokens", 4, "--output", run]  # fmt: skip
    full = stage("engine.run", *arguments, limits={resource.RLIMIT_FSIZE: 64 << 10})
    assert full.returncode == 2
    assert full.stderr == f"error: {run}: File too large: cannot be read or written\n"
    assert not run.exists()
    assert stage("engine.run", *arguments).returncode == 0


def climb(ladder, **options) -> subprocess.CompletedProcess:
    command = ["./ladder", "--cores", "2", "results/bundles/small_int4.safetensors"]
    return subprocess.run(command, cwd=ladder.root, capture_output=True, text=True, **options)


def test_ladder_on_a_full_disk(tmp_path):
    """The line is among snakemake's own, nothing that failed is left, and the same command goes on."""
    ladder = prepare(tmp_path / "copy")
    full = climb(ladder, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, 100 << 10)))
    assert full.returncode != 0
    line = "error: results/bundles/small.safetensors: File too large: cannot be read or written"
    assert line in full.stderr.splitlines()
    assert "Traceback" not in full.stderr
    assert made(ladder) == {} and not list(ladder.root.glob("results/bundles/*"))
    again = climb(ladder)
    assert again.returncode == 0, again.stderr
    assert len(made(ladder)) == 2


def test_ladder_on_a_read_only_disk(mounted, tmp_path):
    ladder = prepare(tmp_path / "copy")
    (ladder.root / "results").symlink_to(mounted("ro"))
    done = climb(ladder)
    assert done.returncode != 0
    assert "Read-only file system" in done.stderr and "Traceback" not in done.stderr


def test_memory(tmp_path):
    """Terabytes of weights: numpy's own word on how many."""
    sizes = {"vocab_size": 1 << 20, "hidden_size": 1 << 20}
    done = weights(tmp_path / "x", json.dumps(GROUPED | sizes), limits={resource.RLIMIT_AS: 4 << 30})
    assert done.returncode == 2
    assert done.stderr.startswith("error: memory: out of memory: Unable to allocate ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
