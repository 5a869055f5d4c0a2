"""Decodes a bundle's golden prompts, plain and as trees, and compares them with the golden and with each other.

    python -m tests.cuda.decode --library LIB --bundle FILE --golden FILE --activations float32|bfloat16 --output FILE

What `verify` judges, in one process and without the ladder, for a machine that has a GPU but no snakemake.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from engine.bundle import open_bundle
from engine.evidence import read_goldens
from engine.native import Drafter, Engine
from engine.run import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--library", "--bundle", "--golden"):
        parser.add_argument(name, required=True)
    parser.add_argument("--activations", default="float32")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    bundle, goldens = open_bundle(options.bundle), read_goldens(options.golden)
    longest = max(len(golden.prompt) for golden in goldens.values())
    cases = []

    def add(name, error):
        cases.append({"name": name, "max_abs_error": float(error), "budget": 0.0})

    def engine(**more):
        return Engine(options.library, bundle, context=longest + options.new_tokens, block_size=options.block_size,
                      activations=options.activations, **more)

    plain = {}
    with engine(tree_budget=0) as plain_engine:
        for name, golden in goldens.items():
            plain[name], _ = record(plain_engine, golden.prompt.tolist(), mode="ar", max_new_tokens=options.new_tokens,
                                    overrun=options.block_size)
            if options.activations == "float32":
                tokens = golden.tokens[: options.new_tokens]
                add(f"golden.{name}", (plain[name]["tokens"][: len(tokens)] != tokens).sum())
    for kind in ("oracle", "noisy", "adversarial"):
        for budget in (1, 16, 64):
            with engine(tree_budget=budget, drafter=Drafter(kind=kind, p=0.3, seed=1)) as tree_engine:
                for name, golden in goldens.items():
                    want = plain[name]
                    script = [*golden.prompt.tolist(), *want["tokens"].tolist(), *want["overrun"].tolist()]
                    made, stats = record(tree_engine, golden.prompt.tolist(), mode="ddtree",
                                         max_new_tokens=options.new_tokens, script=script)
                    rows, positions = len(made["logits"]), made["kv"].shape[1]
                    where = f"{kind}.{budget}.{name}"
                    add(f"tokens.{where}", not np.array_equal(made["tokens"], want["tokens"]))
                    add(f"logits.{where}", made["logits"].tobytes() != want["logits"][:rows].tobytes())
                    kv = np.ascontiguousarray(want["kv"][:, :positions])
                    add(f"kv.{where}", made["kv"].tobytes() != kv.tobytes())
                    if kind == "oracle" and budget >= options.block_size - 1:
                        add(f"steps.{where}", stats["steps"] - -(-(options.new_tokens - 1) // options.block_size))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    name = f"decode.{Path(options.bundle).stem}.{options.activations}"
    content = {"operator": name, "backend": "cuda", "cases": cases}
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
