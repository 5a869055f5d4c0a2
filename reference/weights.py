"""Generated weights: the same bytes on every machine, and no idle term.

python -m reference.weights --config JSON --dtype float32|bfloat16 --output FILE
"""

import hashlib
import math
from pathlib import Path

import numpy as np

from reference import stage
from reference.bundle import Bundle, f32_to_bf16
from reference.config import ModelConfig
from reference.tensors import tensor_shapes

SMALL = np.float32(0.125)


def normal(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 of mean 0 and variance 1, bell-shaped within ±3.5.

    Sums of four 16-bit integers from a PCG64 stream of the tensor's own (the order of tensors does not matter),
    then one IEEE multiplication: no libm, nothing that differs between machines.
    """
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16]
    raw = np.random.PCG64(int.from_bytes(key, "little")).random_raw(math.prod(shape))
    total = sum((raw >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)).astype(np.int64)
    return ((total - 131070).astype(np.float32) * np.float32(math.sqrt(3) / 65536)).reshape(shape)


def generate(config: ModelConfig, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices of variance 1/in keep the scale of their input; all layers' branches together add the embedding's
    own variance: so logits have a std near 1 at any size. Whatever goes into a norm is SMALL, so that eps shows."""
    x = normal(seed, name, shape)
    if name.endswith("norm.weight"):
        return np.float32(1) + np.float32(0.2) * x
    if name.endswith("e_score_correction_bias"):
        return np.float32(0.3) * x
    if name == "model.embed_tokens.weight":
        return SMALL * x
    x *= np.float32(1 / math.sqrt(shape[1]))
    if name.endswith("mlp.gate.weight"):
        x *= np.float32(2)
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        x *= SMALL * np.float32(1 / math.sqrt(2 * config.num_hidden_layers))
    elif name.endswith("q_a_proj.weight"):
        x *= SMALL
    elif name.endswith("kv_a_proj_with_mqa.weight"):
        x[: config.kv_lora_rank] *= SMALL  # the rope key behind the latent has no norm
    return x


def generate_bundle(model: dict, dtype: str) -> Bundle:
    """model: Hugging Face fields and `seed`. bfloat16 rounds all but the router's bias, which stays F32."""
    fields = {name: value for name, value in model.items() if name != "seed"}
    config = ModelConfig.from_dict(fields)
    if type(model.get("seed")) is not int:
        raise ValueError(f"seed: {model.get('seed')}: must be an integer")
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        x = generate(config, model["seed"], name, shape)
        tensors[name] = f32_to_bf16(x) if dtype == "bfloat16" and not name.endswith("_bias") else x
    return Bundle(fields, None, tensors)


def main() -> None:
    parser = stage.Parser(description=__doc__)
    parser.add_argument("--config", type=stage.json_object, required=True, help="Hugging Face fields and seed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    bundle = generate_bundle(args.config, args.dtype)
    size = bundle.write(args.output)
    parameters = sum(x.size for x in bundle.tensors.values())
    print(f"generated {len(bundle.tensors)} tensors, {parameters} parameters, {size} bytes ({args.dtype})")


if __name__ == "__main__":
    stage.run(main)
