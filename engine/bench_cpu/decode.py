"""A whole model decodes: the engine on every path against transformers on the same weights, one token at a time."""

import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from engine.bench_cpu.subjects import PATHS
from engine.bench_cpu.timing import Times
from engine.bundle import open_bundle
from engine.native import Engine, EngineError
from reference.bundle import Bundle, write_safetensors
from reference.quantize import quantize_bundle
from reference.weights import generate_bundle

MODEL = {
    "seed": 1,
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 3072,
    "n_routed_experts": 8,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
}
PROMPT = list(range(100, 132))
GROUP = 32


class Ours:
    """Decodes after PROMPT on one path; a call gives the seconds of every token but the first."""

    def __init__(self, library: str, file: Path, activations: str, path: str):
        os.environ["KDTREE_CPU"] = path
        self._engine = Engine(library, open_bundle(file), context=512, activations=activations)
        self.tokens = []

    def __call__(self, count: int) -> list[float]:
        stamps = []
        result = self._engine.generate(
            PROMPT, mode="ar", max_new_tokens=count, on_round=lambda _: stamps.append(time.perf_counter())
        )
        self.tokens = result.tokens
        return [after - before for before, after in itertools.pairwise(stamps)]

    def close(self):
        self._engine.close()


class Transformers:
    """The same by DeepseekV3ForCausalLM, eager, with its KV cache."""

    def __init__(self, bundle: Bundle, dtype: str, folder: Path):
        fields = {**bundle.fields, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
                  "num_key_value_heads": bundle.config.num_attention_heads, "num_nextn_predict_layers": 0}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(fields))
        write_safetensors(folder / "model.safetensors", bundle.tensors, {"format": "pt"})
        self._model = transformers.DeepseekV3ForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self.tokens = []

    @torch.no_grad()
    def __call__(self, count: int) -> list[float]:
        cache, ids, seconds, self.tokens = None, torch.tensor([PROMPT]), [], []
        for _ in range(count):
            begin = time.perf_counter()
            out = self._model(ids, cache=cache, use_cache=True)
            cache, ids = out.cache, out.logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - begin)
            self.tokens.append(int(ids))
        return seconds[1:]

    def close(self):
        del self._model


def measure(library: str, threads: int, rounds: int, count: int) -> list[dict]:
    """One entry a precision: parameters, and of every subject the milliseconds a token."""
    torch.set_num_threads(threads)
    entries = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for dtype, short in (("float32", "F32"), ("bfloat16", "BF16")):
            bundle = generate_bundle(MODEL, dtype)
            bundle.write(folder / "float")
            quantize_bundle(bundle, GROUP).write(folder / "int4")
            subjects = {f"transformers {short}": Transformers(bundle, dtype, folder)}
            parameters = sum(x.size for x in bundle.tensors.values())
            del bundle
            for kind, file in ((short, "float"), ("INT4", "int4")):
                for path in PATHS:
                    try:
                        subjects[f"{path} {kind}"] = Ours(library, folder / file, dtype, path)
                    except EngineError as error:
                        if "KDTREE_CPU" not in str(error):
                            raise
            entries.append(
                {"activations": dtype, "parameters": parameters, "threads": threads}
                | {"subjects": _interleaved(subjects, rounds, count, f"transformers {short}")}
            )
            for subject in subjects.values():
                subject.close()
    return entries


def _interleaved(subjects: dict, rounds: int, count: int, peer: str) -> dict:
    times = {name: Times([], []) for name in subjects}
    for subject in subjects.values():
        subject(2)
    order = list(subjects)
    for _ in range(rounds):
        for name in order:
            cpu = time.process_time()
            times[name].wall.append(statistics.median(subjects[name](count)))
            times[name].cpu.append((time.process_time() - cpu) / count)
        order.append(order.pop(0))
    return {
        name: t.milliseconds()
        | {
            "peer_ratio": t.ratios(times[peer]),
            "same_tokens": sum(a == b for a, b in zip(subjects[name].tokens, subjects[peer].tokens, strict=True)),
        }
        for name, t in times.items()
    }
