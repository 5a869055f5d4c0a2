"""python -m engine generate with arguments that cannot be used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reference.weights import generate_bundle
from tests.bad_input.conftest import with_config
from tests.fuzz.models import GROUPED, as_file

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("library_path")

WRONG = {
    "token outside": (["--prompt-tokens", "1,17"], "--prompt-tokens: 17: outside the vocabulary of 17"),
    "token negative": (["--prompt-tokens=-1"], "--prompt-tokens: -1: outside the vocabulary of 17"),
    "token beyond 64 bits": (["--prompt-tokens", str(2**70)], f"--prompt-tokens: {2**70}: outside the vocabulary"),
    "token no number": (["--prompt-tokens", "1,x"], "--prompt-tokens: 1,x: must be token ids separated by commas"),
    "no tokens": (["--prompt-tokens", ""], "--prompt-tokens: empty: needs at least one token"),
    "no prompt": ([], ""),
    "text for 17 tokens": (["--prompt", "a"], "--prompt: a: this model has no tokenizer"),
    "prompt over the context": (["--prompt-tokens", ",".join(["1"] * 64)], "--max-new-tokens: 24: with a prompt of 64"),
    "no new tokens": (["--prompt-tokens", "1", "--max-new-tokens", "0"], "--max-new-tokens: 0: must be at least 1"),
    "new tokens over the context": (
        ["--prompt-tokens", "1", "--max-new-tokens", "64"],
        "--max-new-tokens: 64: with a prompt of 1 tokens more than max_position_embeddings (64)",
    ),
    "new tokens beyond 32 bits": (
        ["--prompt-tokens", "1", "--max-new-tokens", str(2**32 + 1)],
        f"--max-new-tokens: {2**32 + 1}: with a prompt of 1 tokens more than max_position_embeddings (64)",
    ),
    "stop token": (["--prompt-tokens", "1", "--stop-token-ids", "99"], "--stop-token-ids: 99: outside the vocabulary"),
    "negative budget": (["--prompt-tokens", "1", "--tree-budget", "-1"], "--tree-budget: -1: must be at least 0"),
    "block size 0": (["--prompt-tokens", "1", "--block-size", "0"], "--block-size: 0: must be at least 1"),
    "block size no number": (["--prompt-tokens", "1", "--block-size", "8.5"], "--block-size: invalid int value: '8.5'"),
    "probability": (["--prompt-tokens", "1", "--drafter-p", "1.5"], "--drafter-p: 1.5: must lie in 0…1"),
    "probability NaN": (["--prompt-tokens", "1", "--drafter-p", "nan"], "--drafter-p: nan: must lie in 0…1"),
    "drafter": (["--prompt-tokens", "1", "--drafter", "eagle"], "--drafter: invalid choice: 'eagle'"),
    "mode": (["--prompt-tokens", "1", "--mode", "beam"], "--mode: invalid choice: 'beam'"),
    "device": (["--prompt-tokens", "1", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
    "layers of a bundle": (["--prompt-tokens", "1", "--layers", "0:1"], "--layers: 0:1: only a checkpoint"),
    "unknown argument": (["--prompt-tokens", "1", "--temperature", "1"], "unrecognized arguments: --temperature 1"),
}


@pytest.mark.parametrize(("arguments", "expected"), WRONG.values(), ids=WRONG)
def test_argument(fails, bundle, arguments, expected):
    assert fails("engine", "generate", "--bundle", bundle, "--json", *arguments).startswith(expected)


ENGINE = {
    "budget beyond 32 bits": (["--tree-budget", str(2**32)], f"tree_budget: {2**32}: does not fit 32 bits"),
    "budget of 2^31 - 1": (["--tree-budget", str(2**31 - 1)], "tree_budget: 2147483647: must lie in 0..1048576"),
    "block size beyond 32 bits": (["--block-size", str(2**32 + 8)], f"block_size: {2**32 + 8}: does not fit 32 bits"),
    "block size of 10^9": (["--block-size", str(10**9)], "block_size: 1000000000: must lie in 1..1048576"),
    "seed beyond 64 bits": (["--drafter-seed", str(2**63)], f"drafter_seed: {2**63}: does not fit 64 bits"),
    "too many stop tokens": (
        ["--stop-token-ids", ",".join(["1"] * 1025)],
        "stop_token_ids: 1025: must lie in 0..1024",
    ),
}


@pytest.mark.parametrize(("arguments", "expected"), ENGINE.values(), ids=ENGINE)
def test_refused_by_the_engine(fails, bundle, arguments, expected):
    line = fails("engine", "generate", "--bundle", bundle, "--prompt-tokens", "1", "--json", *arguments)
    assert line == f"{bundle}: {expected}"


def test_bundle(fails, write, float_file, tmp_path):
    truncated = write(float_file.bytes()[:-1])
    line = fails("engine", "generate", "--bundle", truncated, "--prompt-tokens", "1")
    assert line.startswith(f"{truncated}: lm_head.weight: bytes ") and line.endswith(": truncated?")
    missing = tmp_path / "none"
    line = fails("engine", "generate", "--bundle", missing, "--prompt-tokens", "1")
    assert line == f"{missing}: file: No such file or directory: cannot be read"


def test_memory_that_cannot_be_had(fails, write):
    """A KV pool of a hundred terabytes."""
    model = GROUPED | {"kv_lora_rank": 4096, "num_hidden_layers": 6, "max_position_embeddings": 2**30}
    file = write(as_file(generate_bundle(model, "float32")))
    line = fails("engine", "generate", "--bundle", file, "--prompt-tokens", "1", "--max-new-tokens", 2**30 - 1)
    prefix, _, rest = line.partition(" bytes: out of memory, ")
    assert prefix.startswith(f"{file}: KV pool: ") and int(prefix.split()[-1]) > 10**14
    assert rest.endswith(" are free")


def test_weights_without_a_number_in_them(fails, write, float_file):
    """Weights so large that every logit is NaN: found when the round ends."""
    file = float_file.copy()
    begin, end = file.entries["model.layers.0.self_attn.o_proj.weight"]["data_offsets"]
    file.data = file.data[:begin] + np.full((end - begin) // 4, 3e38, np.float32).tobytes() + file.data[end:]
    bundle = write(file)
    line = fails("engine", "generate", "--bundle", bundle, "--prompt-tokens", "1,2")
    assert line == f"{bundle}: logits: NaN: every logit after position 1 is NaN"


def test_library(fails, bundle, write, monkeypatch, tmp_path):
    from engine import api

    monkeypatch.setattr(api, "BUILD", tmp_path)
    line = fails("engine", "generate", "--bundle", bundle, "--prompt-tokens", "1", "--device", "cpu")
    assert line == "--device: cpu: no library under results/build; build it with the ladder first"
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/libkdtree_cpu.so").write_bytes(b"\x7fELF")
    line = fails("engine", "generate", "--bundle", bundle, "--prompt-tokens", "1", "--device", "cpu")
    assert line.startswith(f"library: {tmp_path}/cpu/libkdtree_cpu.so: ")


@pytest.mark.parametrize("argument", [b"caf\xe9", b"\xff\xfe"])
def test_prompt_that_is_no_utf8(library_path, write, argument):
    """Through a process of its own: bytes of the command line that are no text."""
    bundle = write(as_file(generate_bundle(GROUPED | {"vocab_size": 300}, "float32")))
    command = [sys.executable, "-m", "engine", "generate", "--bundle", bundle, "--prompt", argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: --prompt: ") and done.stderr.count(b"\n") == 1


def test_closed_output(library_path, bundle):
    """`… | head -0` closes the pipe: no traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "engine", "generate", "--bundle", bundle, "--prompt-tokens", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_process_of_its_own(library_path, write, float_file):
    """What the other tests run in this process is what a user sees."""
    wrong = write(with_config(float_file, rope_scaling={"type": "linear"}))
    command = [sys.executable, "-m", "engine", "generate", "--bundle", wrong, "--prompt-tokens", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    expected = f"error: {wrong}: rope_scaling.rope_type: linear: only default and yarn are supported\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_sound_one_decodes(library_path, bundle):
    """The bundle that all these break is a right one."""
    command = [sys.executable, "-m", "engine", "generate", "--bundle", bundle, "--prompt-tokens", "1,2", "--json"]
    done = subprocess.run([*command, "--max-new-tokens", "5"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 5
