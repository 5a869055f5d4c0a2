"""Loading takes no more memory than the engine's own weights, one tensor and a little: in a process of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import large, release

ALLOWED = 200 << 20  # beside weights and the largest tensor

MODEL = release.MODEL | {
    "hidden_size": 1024,
    "num_hidden_layers": 3,
    "n_routed_experts": 96,
    "moe_intermediate_size": 1024,
    "intermediate_size": 1024,
}

CHILD = """
import json, sys
from engine.checkpoint import open_checkpoint
from engine.native import Engine

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
checkpoint = open_checkpoint(sys.argv[2])
with Engine(sys.argv[1], checkpoint, context=64) as engine:
    loaded = peak()
    tokens = engine.generate([1, 2, 3], mode="ar", max_new_tokens=4).tokens
with Engine(sys.argv[1], checkpoint, context=64) as engine:
    again = peak()
largest = max(tensor.n_bytes for tensor in checkpoint.tensors.values())
print(json.dumps({"before": before, "loaded": loaded, "again": again, "weights": checkpoint.n_bytes,
                  "largest": largest}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Some 350 MB."""
    folder = tmp_path_factory.mktemp("large") / "model"
    large.write(folder, MODEL)
    yield folder
    shutil.rmtree(folder)


def test_peak_memory(folder, library_path):
    command = [sys.executable, "-c", CHILD, library_path, folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    allowed = made["weights"] + made["largest"] + ALLOWED
    assert made["weights"] > 1.5 * ALLOWED  # a second copy would show
    assert made["loaded"] - made["before"] <= allowed, made
    assert made["again"] - made["before"] <= allowed, made  # close() gave the first engine's memory back
