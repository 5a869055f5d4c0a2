"""Decodes a golden's prompts with the engine and records what the verdict compares.

python -m engine.run --library LIB --bundle FILE --golden FILE --mode ar|ddtree … --output FILE

Records only: nothing is judged here. A plain run goes one block past its end, so that every row a tree commits has
bytes to compare with; it is the script of the DDTree runs' drafter.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np

from engine.bundle import open_bundle
from engine.evidence import Golden, read_goldens, read_run
from engine.native import BackendError, Drafter, Engine, EngineError
from reference import stage
from reference.bundle import write_safetensors


def record(engine: Engine, prompt: list[int], **options) -> tuple[dict[str, np.ndarray], dict]:
    """One prompt -> (tensors, stats) of a run file."""
    rounds, logits, kv_hashes = [], [], []

    def on_round(round_):
        rounds.append(round_)
        logits.append(round_.logits)
        kv_hashes.append(hashlib.sha256(round_.kv.tobytes()).hexdigest())

    result = engine.generate(prompt, record=True, on_round=on_round, **options)
    rows = sum(round_.accepted for round_ in rounds)
    tensors = {
        "tokens": np.array(result.tokens, np.int32),
        "logits": np.concatenate(logits),
        "kv": engine.read_kv(len(prompt) - 1 + rows),
        "rounds": np.array([(round_.n_rows, round_.accepted) for round_ in rounds], np.int32),
    }
    if options.get("overrun"):
        tensors["overrun"] = np.array([t for round_ in rounds if round_.overrun for t in round_.tokens], np.int32)
    stats = {
        "steps": len(rounds) - 1,
        "committed": rows,
        "stop_reason": result.stop_reason,
        "logits_sha256": [hashlib.sha256(rows.tobytes()).hexdigest() for rows in logits],
        "kv_sha256": kv_hashes,
    }
    return tensors, stats


def forced_logits(engine: Engine, golden: Golden) -> np.ndarray:
    """[tokens, vocab]: row t is decoded after the prompt and the first t golden tokens, whatever the engine chose."""
    rows, sequence = [], [*golden.prompt.tolist(), *golden.tokens.tolist()]
    kept = 0  # the last call left the KV rows of all tokens it was given
    for end in range(len(golden.prompt), len(sequence)):
        engine.generate(
            sequence[:end],
            mode="ar",
            max_new_tokens=1,
            kept=kept,
            record=True,
            on_round=lambda round_: rows.append(round_.logits[0]),
        )
        kept = end
    return np.stack(rows)


def run(args: argparse.Namespace) -> None:
    bundle, goldens = open_bundle(args.bundle), read_goldens(args.golden)
    scripts = {}
    if args.mode == "ddtree":
        for name, plain in read_run(args.script).prompts.items():
            scripts[name] = [*goldens[name].prompt, *plain.tokens, *plain.overrun]
    context = max(len(golden.prompt) for golden in goldens.values()) + args.max_new_tokens
    tensors, prompts = {}, []
    with Engine(
        args.library,
        bundle,
        context=context,
        block_size=args.block_size,
        tree_budget=args.tree_budget,
        activations=args.activations,
        drafter=Drafter(**args.drafter),
    ) as engine:
        for name, golden in goldens.items():
            begin = time.perf_counter()
            made, stats = record(
                engine,
                golden.prompt.tolist(),
                mode=args.mode,
                max_new_tokens=args.max_new_tokens,
                stop_token_ids=args.stop_token_ids,
                script=scripts.get(name, ()),
                overrun=args.block_size if args.mode == "ar" else 0,
            )
            if args.mode == "ar" and args.activations == "bfloat16":
                made["forced_logits"] = forced_logits(engine, golden)
            tensors |= {f"{name}.{tensor}": array for tensor, array in made.items()}
            prompts.append({"name": name, **stats})
            print(
                f"{args.mode} {name}: tokens={len(made['tokens'])} steps={stats['steps']} "
                f"committed={stats['committed']} ({time.perf_counter() - begin:.3f} s)"
            )
        settings = {
            "mode": args.mode,
            "backend": engine.backend,
            "variant": engine.variant,
            "activations": args.activations,
            "block_size": args.block_size,
            "operators": sorted(engine.called_operators),
            "prompts": prompts,
        }
    if args.mode == "ddtree":
        settings |= {"tree_budget": args.tree_budget, "drafter": args.drafter}
    write_safetensors(args.output, tensors, {"kdtree": json.dumps(settings, sort_keys=True)})


def main() -> None:
    parser = stage.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libkdtree_<backend>.so")
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--golden", required=True, help="whose prompts to decode")
    parser.add_argument("--mode", required=True, choices=("ar", "ddtree"))
    parser.add_argument("--activations", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--tree-budget", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--stop-token-ids", type=json.loads, default=[])
    parser.add_argument("--drafter", type=json.loads, default={"kind": "oracle"}, help='{"kind", "p", "seed"}')
    parser.add_argument("--script", help="ddtree: the run file of plain decoding")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.mode == "ddtree" and not args.script:
        parser.error("--script: missing: the drafter needs the plain run")
    try:
        run(args)
    except BackendError as error:
        raise ValueError(error) from None
    except EngineError as error:
        raise ValueError(f"{args.bundle}: {error}") from None


if __name__ == "__main__":
    stage.run(main)
