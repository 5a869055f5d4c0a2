"""Loading takes no more memory than the engine's own weights, one tensor and a little: in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reference.bundle import write_safetensors
from reference.config import ModelConfig
from reference.tensors import tensor_shapes
from tests.checkpoint import release

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
def large(tmp_path_factory):
    """Some 350 MB in one file; values do not matter here, so all matrices of a shape share theirs."""
    folder = tmp_path_factory.mktemp("large") / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    made, tensors = {}, {}

    def values(kind, shape, make):
        return made.setdefault((kind, shape), make())

    config = ModelConfig.from_dict(MODEL)
    for name, shape in tensor_shapes(config).items():
        stem = name.removesuffix(".weight")
        if ".experts." in name:
            codes, groups = (shape[0], shape[1] // 8), (shape[0], shape[1] // release.GROUP)
            tensors[stem + ".weight_packed"] = values(
                "codes", codes, lambda s=codes: rng.integers(-(2**31), 2**31, s).astype(np.int32)
            )
            tensors[stem + ".weight_scale"] = values("scales", groups, lambda s=groups: np.full(s, 0x3B00, np.uint16))
        elif name.endswith("_bias"):
            tensors[name] = np.zeros(shape, np.float32)
        else:
            tensors[name] = values("floats", shape, lambda s=shape: rng.integers(0x3C00, 0x3D00, s).astype(np.uint16))
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    fields = {name: value for name, value in MODEL.items() if name != "seed"}
    content = fields | {"model_type": "kimi_k2", "quantization_config": release.QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(content))
    yield folder
    (folder / "model.safetensors").unlink()


def test_peak_memory(large, library_path):
    command = [sys.executable, "-c", CHILD, library_path, large]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    allowed = made["weights"] + made["largest"] + ALLOWED
    assert made["weights"] > 1.5 * ALLOWED  # a second copy would show
    assert made["loaded"] - made["before"] <= allowed, made
    assert made["again"] - made["before"] <= allowed, made  # close() gave the first engine's memory back
