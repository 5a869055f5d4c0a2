"""What a checkpoint needs of each GPU, from its config.json alone: weights by part, room for KV, the floor in time.

Bytes are those of the release: what `ignore` does not name is INT4 where the config says so, all other weights are in
its dtype, the router's bias is F32. Sizes are decimal (1 GB = 10^9 bytes).
"""

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Literal

from engine.checkpoint import CheckpointError, quantization_of, read_config, read_json
from reference.config import ModelConfig, short
from reference.tensors import is_quantised, tensor_shapes

Parallel = Literal["tp", "ep", "pp"]
FLOAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHAPE_BYTES = 8  # weight_shape: two int32
PARTS = ("routed experts", "shared experts", "attention", "dense MLP", "router", "norms", "embedding", "head")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B(?:/s)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Bytes of one tensor group: a part of one layer (-1: the embedding, num_hidden_layers: the head and its norm)."""

    part: str
    layer: int
    n_bytes: int
    replicated: bool  # under tensor parallelism every GPU holds it whole
    read: float  # the fraction that one token reads


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU's share, in bytes; `left` is what its memory has beyond the weights."""

    layers: range
    parts: dict[str, int]
    weights: int
    left: int
    kv_per_token: int
    kv_tokens: int  # that fit into `left`
    read_per_token: int  # weights and, at the planned context, KV


@dataclasses.dataclass(frozen=True)
class Plan:
    total: int
    layer_bytes: list[int]
    parts: dict[str, int]
    kv_per_token: int
    read_per_token: int  # of weights, all GPUs together, each tensor once
    gpus: list[Gpu]
    floor_seconds: float  # a token at batch 1, by bytes and bandwidth alone
    fits: bool  # weights and the planned context, in every GPU


def parse_size(text: str) -> int:
    """96GB, 141GiB, 4.8TB/s -> bytes. Raises ValueError."""
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text}: must be a size such as 96GB or 90GiB")
    number, unit, binary = match.groups()
    return round(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))


def read_plan(folder: str | Path, *, gpus: int = 1, memory: int = 0, context: int = 32768, parallel: Parallel = "pp",
              bandwidth: float = 4.8e12) -> Plan:  # fmt: skip
    """The plan for `gpus` GPUs of `memory` bytes each that read `bandwidth` bytes a second, one sequence of `context`
    tokens. tp: heads, MLP and expert columns, vocabulary split; latents, router and norms whole on every GPU. ep: whole
    experts split, all else on every GPU. pp: whole layers in a row. Raises CheckpointError.
    """
    _, config, group_size = read_config(folder)
    weights = _weights(Path(folder), config, group_size)
    total = sum(w.n_bytes for w in weights)
    kv_layer = config.kv_width * 2  # bf16
    stages = _stages(config, weights, gpus) if parallel == "pp" else [range(config.num_hidden_layers)] * gpus
    shares = []
    for index, layers in enumerate(stages):
        held = _share(config, weights, parallel, gpus, layers, index)
        parts = {part: round(sum(n for w, n in held if w.part == part)) for part in PARTS}
        own, kv = sum(parts.values()), kv_layer * len(layers)
        read = round(sum(_read(config, w, n, parallel, gpus) for w, n in held))
        shares.append(Gpu(layers, parts, own, memory - own, kv, max(0, memory - own) // kv, read + kv * context))
    reads = [gpu.read_per_token for gpu in shares]
    return Plan(
        total=total,
        layer_bytes=[sum(w.n_bytes for w in weights if w.layer == i) for i in range(config.num_hidden_layers)],
        parts={part: sum(w.n_bytes for w in weights if w.part == part) for part in PARTS},
        kv_per_token=kv_layer * config.num_hidden_layers,
        read_per_token=round(sum(w.n_bytes * w.read for w in weights)),
        gpus=shares,
        floor_seconds=(sum(reads) if parallel == "pp" else max(reads)) / bandwidth,  # stages wait for each other
        fits=all(gpu.kv_tokens >= context for gpu in shares),
    )


def _weights(folder: Path, config: ModelConfig, group_size: int) -> list[Weights]:
    path = folder / "config.json"
    content = read_json(path)
    text = content.get("text_config", content)
    dtype = next((c[name] for c in (text, content) for name in ("dtype", "torch_dtype") if c.get(name)), "bfloat16")
    if dtype not in FLOAT_BYTES:
        raise CheckpointError(f"{path}: dtype: {short(dtype)}: not one of {', '.join(FLOAT_BYTES)}")
    ignored = _ignored(path, quantization_of(content)) if group_size else []
    expert_share = config.num_experts_per_tok / config.n_routed_experts
    found: dict[tuple, int] = {}
    one_expert = dataclasses.replace(config, n_routed_experts=1, n_group=1, topk_group=1, num_experts_per_tok=1)
    for name, shape in tensor_shapes(one_expert).items():  # one expert stands for all: they are alike
        part, layer = _part(name, config)
        copies = config.n_routed_experts if part in ("routed experts", "router") else 1
        count = math.prod(shape)
        if group_size and is_quantised(name) and not any(p.match(name.removesuffix(".weight")) for p in ignored):
            n_bytes = count // 2 + count // group_size * FLOAT_BYTES[dtype] + SHAPE_BYTES
        else:
            n_bytes = count * (4 if name.endswith("_bias") else FLOAT_BYTES[dtype])
        replicated = part in ("router", "norms") or "q_a_proj" in name or "kv_a_proj" in name
        key = (part, layer, replicated)
        found[key] = found.get(key, 0) + n_bytes * copies
    read = {"routed experts": expert_share, "embedding": 1 / config.vocab_size}
    return [Weights(part, layer, n, replicated, read.get(part, 1.0)) for (part, layer, replicated), n in found.items()]


def _part(name: str, config: ModelConfig) -> tuple[str, int]:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if not match:
        last = config.num_hidden_layers
        return {"model.embed_tokens.weight": ("embedding", -1), "lm_head.weight": ("head", last)}.get(
            name, ("norms", last)
        )
    layer = int(match[1])
    for piece, part in ((".experts.", "routed experts"), (".shared_experts.", "shared experts"), (".gate.", "router"),
                        ("norm.", "norms"), (".self_attn.", "attention")):  # fmt: skip
        if piece in name:
            return part, layer
    return "dense MLP", layer


def _ignored(path: Path, quantization: dict) -> list[re.Pattern]:
    """What `ignore` names, as patterns that match a module's whole name. Repeated groups are refused: they could take
    for ever."""
    patterns = []
    for entry in quantization.get("ignore") or []:
        text = entry.removeprefix("re:") if isinstance(entry, str) else ""
        if not re.fullmatch(r"[\w\\.|()*^$-]{1,200}", text) or ")*" in text or text.count("*") > 4:
            raise CheckpointError(f"{path}: quantization_config.ignore: {short(entry)}: not understood")
        try:
            patterns.append(re.compile(text if entry.startswith("re:") else re.escape(text) + "$"))
        except re.error as error:
            raise CheckpointError(f"{path}: quantization_config.ignore: {short(entry)}: {error}") from None
    return patterns


def _stages(config: ModelConfig, weights: list[Weights], gpus: int) -> list[range]:
    """Layers in a row for each GPU such that the fullest holds as little as possible."""
    sizes = [0] * config.num_hidden_layers
    for w in weights:
        sizes[min(max(w.layer, 0), len(sizes) - 1)] += w.n_bytes
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(sizes, middle)) <= gpus else (middle + 1, high)
    stages = _fill(sizes, low)
    return stages + [range(len(sizes), len(sizes))] * (gpus - len(stages))


def _fill(sizes: list[int], most: int) -> list[range]:
    """Greedily, at most `most` bytes a stage."""
    stages, begin, size = [], 0, 0
    for layer, n in enumerate(sizes):
        if size + n > most:
            stages.append(range(begin, layer))
            begin, size = layer, 0
        size += n
    return [*stages, range(begin, len(sizes))]


def _share(config: ModelConfig, weights: list[Weights], parallel: Parallel, gpus: int, layers: range, index: int):
    """[(weights, bytes of them on this GPU)]"""
    if parallel == "tp":
        return [(w, w.n_bytes if w.replicated else w.n_bytes / gpus) for w in weights]
    if parallel == "ep":
        experts = len(range(index, config.n_routed_experts, gpus)) / config.n_routed_experts
        return [(w, w.n_bytes * experts if w.part == "routed experts" else w.n_bytes) for w in weights]
    first, last = 0 in layers, config.num_hidden_layers - 1 in layers
    at_home = [w for w in weights if w.layer in layers or (first and w.layer < 0)]
    return [(w, w.n_bytes) for w in at_home + [w for w in weights if last and w.layer == config.num_hidden_layers]]


def _read(config: ModelConfig, w: Weights, held: float, parallel: Parallel, gpus: int) -> float:
    """Bytes of `w` that one token reads on a GPU that holds `held` of them."""
    if parallel == "ep" and w.part == "routed experts":  # at best spread evenly, but an expert is read whole
        return w.n_bytes / config.n_routed_experts * math.ceil(config.num_experts_per_tok / gpus)
    return held * w.read


def as_text(plan: Plan, memory: int, context: int, bandwidth: float) -> str:
    """The plan as a table."""

    def gb(n: float) -> str:
        return f"{n / 1e9:.2f} GB"

    lines = [f"weights {gb(plan.total)}: " + ", ".join(f"{part} {gb(n)}" for part, n in plan.parts.items() if n)]
    kinds = [f"{n / 1e9:.3f} GB ({plan.layer_bytes.count(n)} of them)" for n in dict.fromkeys(plan.layer_bytes)]
    lines.append("a layer: " + ", ".join(kinds))
    lines.append(f"KV {plan.kv_per_token:,} bytes/token, {gb(plan.kv_per_token * context)} at {context} tokens")
    first = 0
    for gpu, alike in itertools.groupby(plan.gpus):
        last = first + len(list(alike)) - 1
        who, first = f"GPU {first}" if first == last else f"GPUs {first}…{last}, each", last + 1
        parts = ", ".join(f"{part} {n / 1e9:.2f}" for part, n in gpu.parts.items() if n)
        held = f"layers {gpu.layers.start}…{gpu.layers.stop - 1}" if gpu.layers else "idle"
        lines.append(f"{who}: {held}: weights {gb(gpu.weights)} ({parts})")
        if memory:
            lines.append(f"    left of {gb(memory)}: {gb(gpu.left)}: KV for {gpu.kv_tokens:,} tokens")
    lines.append(f"read per token: weights {gb(plan.read_per_token)}; floor {plan.floor_seconds * 1e3:.2f} ms = "
                 f"{1 / plan.floor_seconds:.0f} tokens/s at batch 1 and {bandwidth / 1e12:.2f} TB/s")  # fmt: skip
    if memory:
        lines.append("fits" if plan.fits else f"does not fit: weights and {context} tokens of KV need more memory")
    lines.append("Activations, workspace and the runtime come on top.")
    if len(plan.gpus) > 1:
        lines.append("A plan only: this engine runs on one GPU so far.")
    return "\n".join(lines)
