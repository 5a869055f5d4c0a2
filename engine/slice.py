"""A slice of a large model, weights made where they are used: decoding by bytes, and a numpy check of sampled logits.

python -m engine.slice --config configs/k26_slice.yaml [--layers N] [--dense N] [--vocab N] [--device …]
    [--activations float32|bfloat16] [--shards DIR] [--output FILE]

AR and DDTree must agree in tokens, in the bytes of every logit and in the committed KV; with float32 activations
sampled logits must agree with float64 numpy, which makes only the experts that the sampled rows are routed to. With
--shards the weights are first written there as a released folder and read from it. Exit status 1 where anything does
not hold.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import yaml

from engine.api import find_library
from engine.checkpoint import CheckpointError, open_checkpoint
from engine.export import ExportError, export_bundle
from engine.generated import GeneratedModel, generate_model
from engine.native import BackendError, Drafter, Engine, EngineError
from reference import model as reference
from reference import ops, rope
from reference.bundle import as_float
from reference.config import short
from reference.files import write_text
from reference.tensors import PROJECTIONS


class LazyWeights:
    """A generated model's tensors by name, float ones in float64, each made when it is asked for."""

    def __init__(self, model: GeneratedModel):
        self._tensors = model.tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._tensors[name].load()
        return array if array.dtype == np.int32 else as_float(array).astype(np.float64)

    def rows(self, name: str, indices) -> np.ndarray:
        return as_float(np.stack([self._tensors[name].row(i) for i in indices])).astype(np.float64)


class SampledModel(reference.Model):
    """The numpy model on a few rows: it makes those rows of embedding and head, and the experts that they hit."""

    def __init__(self, model: GeneratedModel):
        self.config, self.dtype, self.group = model.config, np.float64, model.group_size
        self.softmax_scale = rope.softmax_scale(model.config)
        self.weights = LazyWeights(model)

    def sampled_logits(self, tokens: list[int], vocabulary: np.ndarray) -> np.ndarray:
        """float64 [len(tokens), len(vocabulary)] of a sequence."""
        rows = np.arange(len(tokens))
        kv, parents = self.empty_kv(len(tokens)), reference.chain(len(tokens))
        tables = rope.rope_tables(self.config, len(tokens))
        x = self.weights.rows("model.embed_tokens.weight", tokens)
        for layer in range(self.config.num_hidden_layers):
            p, a = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
            h = self.norm(p + "input_layernorm", x)
            kv[layer] = self.keys(a, h, rows, tables)
            y = self.mla_absorbed(a, *self.queries(a, h, rows, tables), kv[layer], 0, parents)
            x = self.linear(a + "o_proj", y.reshape(len(x), -1), x)
            mlp = self.moe if self.config.is_moe(layer) else self.mlp
            x = mlp(p + "mlp.", self.norm(p + "post_attention_layernorm", x), x)
        return ops.gemm(self.norm("model.norm", x), self.weights.rows("lm_head.weight", vocabulary))

    def moe(self, p: str, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        c, bias = self.config, self.weights[p + "gate.e_score_correction_bias"]
        routing = (c.num_experts_per_tok, c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor)
        experts, weights = ops.moe_route(self.linear(p + "gate", x), bias, *routing)
        hit, places = np.unique(experts, return_inverse=True)
        matrices = [
            np.stack([self.weights[f"{p}experts.{e}.{name}{part}"] for e in hit])
            for name in PROJECTIONS
            for part in (".qw", ".sc")
        ]
        shared = self.mlp(p + "shared_experts.", x) if c.n_shared_experts else None
        return ops.w4a16_moe_experts(x, places.reshape(experts.shape), weights, *matrices, self.group, shared, residual)


def decode(engine: Engine, prompt: list[int], script: list[int], mode: str, **options) -> dict[str, np.ndarray]:
    """One recorded run: tokens, logits and KV of every committed row, and what is after the end."""
    rounds = []
    result = engine.generate(prompt, mode=mode, script=script, record=True, on_round=rounds.append, **options)
    rows = sum(round_.accepted for round_ in rounds)
    return {
        "tokens": result.tokens,
        "overrun": [token for round_ in rounds if round_.overrun for token in round_.tokens],
        "logits": np.concatenate([round_.logits for round_ in rounds]),
        "kv": engine.read_kv(len(prompt) - 1 + rows),
        "steps": result.steps,
        "committed": result.committed,
    }


def run(config: dict, model: GeneratedModel, library: Path, activations: str, shards: Path | None = None) -> dict:
    """What is measured, with `holds` for each claim."""
    if shards:
        export_bundle(model, shards)
    options = config["decode"]
    rng = np.random.default_rng(config["seed"])
    vocab = model.config.vocab_size
    prompt = rng.integers(0, vocab, options["prompt_length"]).tolist()
    limits = {"max_new_tokens": options["max_new_tokens"]}
    context = len(prompt) + options["max_new_tokens"]
    begin = time.perf_counter()
    source = open_checkpoint(shards) if shards else model
    with Engine(library, source, context=context, block_size=options["block_size"], tree_budget=options["tree_budget"],
                activations=activations, drafter=Drafter(**options["drafter"])) as engine:  # fmt: skip
        loaded = time.perf_counter()
        plain = decode(engine, prompt, [], "ar", overrun=options["block_size"], **limits)
        script = [*prompt, *plain["tokens"], *plain["overrun"]]
        tree = decode(engine, prompt, script, "ddtree", **limits)
        decoded = time.perf_counter()
        sequence = rng.integers(0, vocab, config["reference"]["rows"]).tolist()
        forced = [
            decode(engine, sequence[: n + 1], [], "ar", max_new_tokens=1)["logits"][0] for n in range(len(sequence))
        ]
        backend = engine.backend
    rows, positions = len(tree["logits"]), tree["kv"].shape[1]
    made = {
        "backend": backend,
        "activations": activations,
        "layers": model.config.num_hidden_layers,
        "tokens": len(plain["tokens"]),
        "steps": tree["steps"],
        "avg_accept": (tree["committed"] - 1) / tree["steps"],
        "logit_std": float(plain["logits"].std()),
        "load_seconds": loaded - begin,
        "decode_seconds": decoded - loaded,
        "holds": {
            "exact": plain["tokens"] == tree["tokens"],
            "bitwise_logits": plain["logits"][:rows].tobytes() == tree["logits"].tobytes(),
            "bitwise_kv": np.ascontiguousarray(plain["kv"][:, :positions]).tobytes() == tree["kv"].tobytes(),
        },
    }
    if activations == "float32":
        vocabulary = np.sort(rng.choice(vocab, config["reference"]["vocabulary"], replace=False))
        golden = SampledModel(model).sampled_logits(sequence, vocabulary)
        error = float(np.abs(np.stack(forced)[:, vocabulary] - golden).max())
        made |= {"max_abs_logit_error": error, "bound": config["reference"]["bound"]}
        made["holds"]["numpy"] = error <= config["reference"]["bound"]
        made["reference_seconds"] = time.perf_counter() - decoded
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="instead of the config's num_hidden_layers")
    parser.add_argument("--dense", type=int, help="instead of the config's first_k_dense_replace")
    parser.add_argument("--vocab", type=int, help="a smaller vocabulary, where memory is short")
    parser.add_argument("--activations", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--library", type=Path)
    parser.add_argument("--shards", type=Path, help="a new folder, as large as the weights")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    try:
        config = yaml.safe_load(args.config.read_text())
    except (OSError, yaml.YAMLError) as error:
        print(f"error: {args.config}: {short(error)}: cannot be read as YAML", file=sys.stderr)
        return 2
    changes = {"num_hidden_layers": args.layers, "first_k_dense_replace": args.dense, "vocab_size": args.vocab}
    fields = config["model"] | {name: value for name, value in changes.items() if value is not None}
    try:
        model = generate_model(fields, config["seed"], config["group_size"])
        made = run(config, model, args.library or find_library(args.device), args.activations, args.shards)
    except (BackendError, CheckpointError, ExportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ValueError, EngineError) as error:
        print(f"error: {args.config}: {error}", file=sys.stderr)
        return 2
    text = json.dumps(made, indent=1)
    print(text)
    if args.output:
        write_text(args.output, text + "\n")
    return 0 if all(made["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
