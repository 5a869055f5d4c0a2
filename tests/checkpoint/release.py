"""A synthetic release in the layout of Kimi-K2.6, small: shards, names, dtypes and quirks as real."""

import json
from pathlib import Path

import numpy as np

from reference.bundle import Bundle, as_float, f32_to_bf16, write_safetensors
from reference.quantize import pack, quantize
from reference.weights import generate_bundle

GROUP = 32
SHARDS = 12
PREFIX = "language_model."

MODEL = {
    "seed": 7,
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 96,
    "n_routed_experts": 8,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 256},
    "max_position_embeddings": 16384,
}  # fmt: skip

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
                        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
                        "observer_kwargs": {}},
        }
    },
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
               "re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*"],
}  # fmt: skip


def make_bundle(layers: range | None = None, dtype: str = "bfloat16") -> Bundle:
    """The release's model as a bundle: routed experts INT4, all else in `dtype`. `layers`: those alone, renumbered."""
    whole = generate_bundle(MODEL, dtype)
    tensors = {}
    for name, w in whole.tensors.items():
        if ".experts." not in name:
            tensors[name] = w
            continue
        q, scales = quantize(as_float(w), GROUP)
        stem = name.removesuffix(".weight")
        tensors[stem + ".qw"], tensors[stem + ".sc"] = pack(q), f32_to_bf16(scales) if w.dtype == np.uint16 else scales
    fields = dict(whole.fields)
    if layers is not None:
        fields |= {"num_hidden_layers": len(layers), "first_k_dense_replace": max(0, 1 - layers.start)}
        kept = {}
        for name, x in tensors.items():
            parts = name.split(".")
            if parts[1] == "layers":
                if int(parts[2]) not in layers:
                    continue
                parts[2] = str(int(parts[2]) - layers.start)
            kept[".".join(parts)] = x
        tensors = kept
    return Bundle(fields, {"bits": 4, "group_size": GROUP}, tensors)


def text_config() -> dict:
    """config.json's text part, with the fields that a text engine does not need."""
    fields = {name: value for name, value in MODEL.items() if name != "seed"}
    return fields | {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16",
        "num_key_value_heads": 2, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
        "ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "temperature": 1.0, "top_k": 50, "do_sample": False,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "quantization_config": QUANTIZATION,
    }  # fmt: skip


def config() -> dict:
    return {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
        "text_config": text_config(),
        "vision_config": {"vt_hidden_size": 1152, "patch_size": 14},
        "media_placeholder_token_id": 163605,
        "ignore_index": -100,
    }


def tensors(bundle: Bundle, shape_dtype: type = np.int32) -> dict[str, np.ndarray]:
    """The released names: packed experts, the vision part, and leftovers that an engine must skip."""
    released = {}
    for name, x in bundle.tensors.items():
        name = PREFIX + name
        stem = name[:-3]
        if name.endswith(".qw"):
            released[stem + ".weight_packed"] = x
            released[stem + ".weight_shape"] = np.array([x.shape[0], x.shape[1] * 8], shape_dtype)
        elif name.endswith(".sc"):
            released[stem + ".weight_scale"] = x
        else:
            released[name] = x
    bf16 = np.full((3, 2, 2, 2), 0x3F80, np.uint16)
    released["vision_tower.patch_embed.proj.weight"] = bf16
    released["vision_tower.encoder.blocks.0.norm0.bias"] = bf16[0, 0, 0]
    released["mm_projector.proj.0.weight"] = bf16[0, 0]
    for layer in range(MODEL["num_hidden_layers"]):
        name = f"{PREFIX}model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        released[name] = np.full(56, 0x3F80, np.uint16)
    released[f"{PREFIX}model.layers.{MODEL['num_hidden_layers']}.eh_proj.weight"] = bf16[0, 0]  # MTP
    return released


def shard_names(count: int = SHARDS) -> list[str]:
    return [f"model-{i:05}-of-{count:06}.safetensors" for i in range(1, count + 1)]


def place(released: dict[str, np.ndarray], count: int = SHARDS) -> dict[str, dict[str, np.ndarray]]:
    """Tensors by shard: in canonical order, so that layers straddle shards, embedding and head in the last one; in a
    shard by element size and name, as safetensors writes them."""
    last = [name for name in released if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    others = [name for name in released if name not in last]
    per_shard = -(-len(others) // (count - 1))
    groups = [others[i * per_shard : (i + 1) * per_shard] for i in range(count - 1)] + [last]
    order = [sorted(group, key=lambda name: (-released[name].itemsize, name)) for group in groups]
    return {
        file: {name: released[name] for name in group} for file, group in zip(shard_names(count), order, strict=True)
    }


def write(folder: Path, bundle: Bundle | None = None, **options) -> Path:
    """The release, as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = place(tensors(bundle or make_bundle(), **options))
    for file, content in shards.items():
        write_safetensors(folder / file, content, {"format": "pt"})
    placed = {name: file for file, content in shards.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3], "max_length": 20}))
    return folder
