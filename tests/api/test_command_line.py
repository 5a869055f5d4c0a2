"""python -m engine, as a user with a checkpoint calls it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine import api
from tests.checkpoint import release

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(library_path):
    def run(*arguments) -> subprocess.CompletedProcess:
        library = ["--library", library_path] if arguments[0] == "generate" else []
        command = [sys.executable, "-m", "engine", *map(str, [*arguments, *library])]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    return run


def test_generate_as_json(run, checkpoint):
    made = {}
    for mode in ("ar", "ddtree"):
        done = run("generate", "--checkpoint", checkpoint, "--prompt", "def walk", "--mode", mode, "--json",
                   "--stop-token-ids", "", "--max-new-tokens", 20)  # fmt: skip
        assert done.returncode == 0, done.stderr
        made[mode] = json.loads(done.stdout)
        assert made[mode].keys() == {"tokens", "text", "stop_reason", "stats"}
    assert made["ar"]["tokens"] == made["ddtree"]["tokens"] and len(made["ar"]["tokens"]) == 20
    assert made["ddtree"]["stats"]["avg_accept"] == 8


def test_generate_streams_text_and_reports(run, checkpoint):
    options = ("generate", "--checkpoint", checkpoint, "--prompt", "def walk", "--stop-token-ids", "")
    wanted = json.loads(run(*options, "--json").stdout)
    done = run(*options)
    assert done.stdout == wanted["text"] + "\n"
    assert done.stderr.startswith("length: ") and "tokens_per_second" in done.stderr and "avg_accept" in done.stderr
    stop = wanted["text"][5:9]
    cut = json.loads(run(*options, "--json", "--stop", stop).stdout)
    assert (cut["text"], cut["stop_reason"]) == (wanted["text"][: wanted["text"].index(stop)], "stop_string")


def test_chat_and_layers(run, checkpoint):
    done = run("generate", "--checkpoint", checkpoint, "--prompt", "hi", "--chat", "--system", "Be brief.", "--json",
               "--layers", "0:2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stats"]["prompt_tokens"] > 8


def test_export_and_import(run, tmp_path):
    release.make_bundle().write(tmp_path / "a.safetensors")
    done = run(
        "export", "--bundle", tmp_path / "a.safetensors", "--output", tmp_path / "folder", "--shard-size", "100kB"
    )
    assert done.returncode == 0 and "shards" in done.stdout, done.stderr
    done = run("import", "--checkpoint", tmp_path / "folder", "--output", tmp_path / "b.safetensors")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_import_names_what_it_skips(run, checkpoint, tmp_path):
    done = run("import", "--checkpoint", checkpoint, "--output", tmp_path / "b.safetensors")
    assert "skipped 2 × vision_tower" in done.stdout and "4 × rotary_emb.inv_freq" in done.stdout


def test_plan(run, checkpoint):
    done = run("plan", "--checkpoint", checkpoint, "--gpus", 2, "--memory", "1MB", "--parallel", "tp")
    assert done.returncode == 0 and "does not fit" in done.stdout, done.stderr
    made = json.loads(run("plan", "--checkpoint", checkpoint, "--json").stdout)
    assert made["total"] == sum(made["parts"].values()) and len(made["gpus"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--checkpoint", "nowhere", "--prompt", "x"], "error: nowhere/config.json: "),
        (["generate", "--checkpoint", "{}", "--prompt", ""], "error: --prompt: empty"),
        (["generate", "--checkpoint", "{}", "--prompt", "<|im_end|>"], "error: --prompt: <|im_end|>: special"),
        (["generate", "--checkpoint", "{}", "--prompt-tokens", "1,320"], "error: --prompt-tokens: 320: outside"),
        (["generate", "--checkpoint", "{}", "--prompt-tokens", "1,x"], "error: --prompt-tokens: 1,x: must"),
        (["generate", "--checkpoint", "{}", "--prompt", "x", "--stop-token-ids", "999"], "error: --stop-token-ids: 9"),
        (["generate", "--checkpoint", "{}", "--prompt", "x", "--max-new-tokens", "0"], "error: --max-new-tokens: 0"),
        (["generate", "--checkpoint", "{}", "--prompt", "x", "--layers", "2:9"], "error: {}/config.json: layers: 2:9"),
        (["generate", "--checkpoint", "{}", "--prompt", "x", "--layers", "2"], "error: --layers: 2: must be a range"),
        (["generate", "--checkpoint", "{}", "--bundle", "b", "--prompt", "x"], "error: --bundle: not allowed with"),
        (["plan", "--checkpoint", "{}", "--memory", "lots"], "error: --memory: lots: must be a size"),
        (["plan", "--checkpoint", "{}", "--gpus", "0"], "error: --gpus: 0: must be at least 1"),
        (["import", "--checkpoint", "{}", "--output", "/proc/x"], "error: /proc/"),
        (["export", "--bundle", "{}/tokenizer.json", "--output", "x"], "error: {}/tokenizer.json: "),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_status_2(run, checkpoint, arguments, message):
    done = run(*(argument.replace("{}", str(checkpoint)) for argument in arguments))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(message.replace("{}", str(checkpoint))) and done.stderr.count("\n") == 1, done.stderr


def test_auto_takes_what_runs_here(tmp_path, monkeypatch, library_path):
    """A CUDA library is built wherever there is nvcc, GPU or not."""
    for backend in ("cpu", "cuda"):
        (tmp_path / backend).mkdir()
    shutil.copy(library_path, tmp_path / "cpu/libkdtree_cpu.so")
    source = 'extern "C" { int kdtree_create() { return 0; } int kdtree_init() { return 1; } }'
    without_gpu = tmp_path / "cuda/libkdtree_cuda.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", without_gpu]
    subprocess.run(command, input=source, text=True, check=True)
    monkeypatch.setattr(api, "BUILD", tmp_path)
    assert api.find_library("auto") == tmp_path / "cpu/libkdtree_cpu.so"
    assert api.find_library("cuda") == without_gpu
