"""Killed or failed calls: README's command goes on, and no verdict outlives what it vouched for."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from driver import Ladder

COMMAND = ["./ladder", "results/tiny.pass", "--cores", "2"]
STAGES = ("weights", "golden", "compile", "link", "check", "ar", "ddtree", "verify")


def wait_for(condition, process) -> bool:
    """Until `condition` holds; false if the process ends before."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if condition():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    raise TimeoutError


@pytest.fixture
def unfinished(ladder) -> Ladder:
    """A copy for `./ladder` that still has to decode and to judge."""
    ladder.install()
    shutil.rmtree(ladder.root / "results/runs")
    (ladder.root / "results/tiny.pass").unlink()
    return ladder


def kill_at(stage: str, ladder: Ladder, with_jobs: bool) -> None:
    """SIGKILL as soon as a job of the stage runs. Snakemake's jobs outlive it, and write on, unless killed too."""
    known = ladder.logs()

    def started():
        return [job for job, time in ladder.logs().items() if job.startswith(f"{stage}/") and known.get(job) != time]

    with open(ladder.root / "output", "wb") as output:
        process = subprocess.Popen(COMMAND, cwd=ladder.root, start_new_session=True, stdout=output, stderr=output)
    assert wait_for(started, process), f"ended before {stage}:\n{ladder.read('output')}"
    os.killpg(process.pid, signal.SIGKILL) if with_jobs else process.kill()
    process.wait()
    assert not (ladder.root / "results/tiny.pass").exists()


def finish(ladder: Ladder, built: Ladder) -> None:
    """The same command goes on, and its verdict is that of a ladder that was never killed."""
    done = subprocess.run(COMMAND, cwd=ladder.root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ladder.read("results/tiny.pass") == built.read("results/tiny.pass")


def test_killed_at_every_stage(fresh, built):
    for stage in STAGES:
        kill_at(stage, fresh, with_jobs=False)
    finish(fresh, built)


def test_killed_with_its_jobs(unfinished, built):
    for stage in ("ar", "ddtree", "verify"):
        kill_at(stage, unfinished, with_jobs=True)
    finish(unfinished, built)


def test_two_calls_at_once(unfinished, built):
    """The second waits for the first, and neither fails."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    calls = [subprocess.Popen(COMMAND, cwd=unfinished.root, **pipe) for _ in range(2)]
    outputs = [call.communicate()[0] for call in calls]
    assert [call.returncode for call in calls] == [0, 0], "\n".join(outputs)
    assert sum("waiting for another ./ladder" in output for output in outputs) == 1
    assert unfinished.read("results/tiny.pass") == built.read("results/tiny.pass")


def test_plain_snakemake_is_left_alone(unfinished, built):
    """Its lock is a live one: ./ladder refuses instead of removing it."""
    plain = [str(unfinished.root / ".venv/bin/python"), "-m", "snakemake", "--cores", "1", "results/tiny.pass"]
    process = subprocess.Popen(plain, cwd=unfinished.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert wait_for(lambda: list((unfinished.root / "results/runs").rglob("*")), process)
    refused = subprocess.run(COMMAND, cwd=unfinished.root, capture_output=True, text=True)
    assert refused.returncode != 0 and "locked" in refused.stderr
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert unfinished.read("results/tiny.pass") == built.read("results/tiny.pass")


def test_source_that_does_not_compile(ladder):
    """The compiler's message is shown, and the verdicts from before are gone."""
    assert (ladder.root / "results/int4_tiny.pass").exists()
    ladder.replace("engine/ops/w4a16_gemm/cpu.cpp", "namespace kdtree::KDTREE_PATH {", "namespace kdtree { broken")
    failed = ladder.snakemake("results/int4_tiny.pass")
    assert failed.returncode != 0
    assert "engine/ops/w4a16_gemm/cpu.cpp" in failed.stderr and "error:" in failed.stderr
    assert not list((ladder.root / "results").glob("*.pass"))


def test_corrupt_output_is_not_taken_for_good(ladder):
    """A run file cut short after it was made: the judge reads it and fails."""
    run = ladder.root / "results/runs/cpu.float32/tiny.ddtree.safetensors"
    run.write_bytes(run.read_bytes()[:-1])
    (ladder.root / "results/tiny.pass").unlink()
    assert ladder.snakemake("results/tiny.pass").returncode != 0
    assert not (ladder.root / "results/tiny.pass").exists()
