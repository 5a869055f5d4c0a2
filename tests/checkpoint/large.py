"""A folder in the layout of a release, as large as asked: a shard a layer. Its values do not matter.

    python -m tests.checkpoint.large --output DIR [--layers N]     0.47 GB a layer

Codes are slices of one random sequence, so that making them costs little memory and time.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from reference.bundle import write_safetensors
from reference.config import ModelConfig
from reference.tensors import tensor_shapes
from tests.checkpoint import release

SIZES = {"hidden_size": 2048, "n_routed_experts": 128, "moe_intermediate_size": 1024, "intermediate_size": 4096}


def write(folder: Path, model: dict) -> None:
    """config.json, index and shards of a model in Hugging Face fields."""
    rng = np.random.default_rng(0)
    config = ModelConfig.from_dict(model)
    codes = rng.integers(-(2**31), 2**31, config.hidden_size * config.moe_intermediate_size).astype(np.int32)

    def values(name, shape):
        stem = name.removesuffix(".weight")
        if ".experts." in name:
            count = shape[0] * shape[1] // 8
            begin = int(rng.integers(codes.size - count))
            return {
                f"{stem}.weight_packed": codes[begin : begin + count].reshape(shape[0], -1),
                f"{stem}.weight_scale": np.full((shape[0], shape[1] // release.GROUP), 0x3B00, np.uint16),
            }
        if name.endswith("_bias"):
            return {name: np.zeros(shape, np.float32)}
        return {name: rng.integers(0x3C00, 0x3D00, shape).astype(np.uint16)}

    folder.mkdir(parents=True)
    shards = {}
    for name, shape in tensor_shapes(config).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        shards.setdefault(layer, []).append((name, shape))
    index = {}
    for layer, tensors in shards.items():
        file = f"model-{layer}.safetensors"
        made = {name: array for tensor in tensors for name, array in values(*tensor).items()}
        write_safetensors(folder / file, made, {"format": "pt"})
        index |= dict.fromkeys(made, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    fields = {name: value for name, value in model.items() if name != "seed"}
    content = fields | {"model_type": "kimi_k2", "quantization_config": release.QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=9)
    options = parser.parse_args()
    write(options.output, release.MODEL | SIZES | {"num_hidden_layers": options.layers})


if __name__ == "__main__":
    main()
