"""The exactness matrix: tree decoding against plain decoding, by bytes, over everything that must not matter.

python -m engine.matrix --library LIB --bundle FILE --golden FILE --axes JSON [--cover pairs] [--long N] --output FILE

One plain run per prompt (one thread, one prefill call) is the measure of every cell: of all budgets, block sizes,
drafters, thread counts and prefill chunkings (or, with `--cover pairs`, of few enough cells that every pair of two
values still meets), and of the scenarios below. If any of them differs: exit status 1, and no file.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.bundle import OpenBundle, TensorView, open_bundle
from engine.evidence import read_goldens
from engine.native import Drafter, Engine
from engine.run import record
from reference.files import write_text

AXES = ("tree_budget", "block_size", "drafter", "threads", "prefill_chunk")
NOISE = 0.3  # of the noisy drafter


@dataclasses.dataclass(frozen=True)
class Setting:
    """What every cell has in common."""

    library: str
    bundle: OpenBundle
    activations: str

    def engine(self, **options) -> Engine:
        return Engine(self.library, self.bundle, activations=self.activations, **options)


@dataclasses.dataclass(frozen=True)
class Plain:
    """What plain decoding yields after one prompt."""

    prompt: list[int]
    tokens: np.ndarray
    logits: np.ndarray
    kv: np.ndarray
    script: list[int]


def plain_runs(setting: Setting, prompts: dict[str, list[int]], new_tokens: int, overrun: int) -> dict:
    """{prompt name: Plain}, by one thread with the whole prompt in one prefill call."""
    longest = max(map(len, prompts.values()))
    runs = {}
    with setting.engine(
        context=longest + new_tokens, block_size=overrun, tree_budget=0, prefill_chunk=longest
    ) as engine:
        set_threads(engine, 1)
        for name, prompt in prompts.items():
            made, _ = record(engine, prompt, mode="ar", max_new_tokens=new_tokens, overrun=overrun)
            script = [*prompt, *made["tokens"].tolist(), *made["overrun"].tolist()]
            runs[name] = Plain(prompt, made["tokens"], made["logits"], made["kv"], script)
    return runs


def set_threads(engine: Engine, count: int) -> None:
    """OpenMP's thread count, where the backend has one."""
    if engine.backend == "cpu":
        engine.omp_set_num_threads(count)


def compare(made: dict[str, np.ndarray], plain: Plain, tokens: np.ndarray) -> dict[str, bool]:
    """A tree run against the plain run: its tokens, and the bytes of every committed row."""
    rows, positions = len(made["logits"]), made["kv"].shape[1]
    return {
        "exact": np.array_equal(made["tokens"], tokens),
        "bitwise_logits": made["logits"].tobytes() == plain.logits[:rows].tobytes(),
        "bitwise_kv": made["kv"].tobytes() == np.ascontiguousarray(plain.kv[:, :positions]).tobytes(),
    }


def all_hold(results: Iterator[dict[str, bool]]) -> dict[str, bool]:
    results = list(results)
    return {key: all(result[key] for result in results) for key in results[0]}


def cells(axes: dict[str, list], cover: str) -> list[dict]:
    """All combinations, or greedily chosen ones in which every pair of two axes' values meets."""
    combinations = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*(axes[a] for a in AXES))]
    if cover == "all":
        return combinations
    pairs_of = [frozenset(itertools.combinations(cell.items(), 2)) for cell in combinations]
    missing, chosen = set().union(*pairs_of), []
    while missing:
        best = max(range(len(combinations)), key=lambda i: len(pairs_of[i] & missing))
        chosen.append(combinations[best])
        missing -= pairs_of[best]
    return chosen


def run_cell(setting: Setting, plain: dict[str, Plain], cell: dict) -> dict:
    """One engine decodes every prompt; a smaller tree follows a larger one where the drafter's script ended."""
    new_tokens = len(next(iter(plain.values())).tokens)
    with setting.engine(
        context=max(len(p.prompt) for p in plain.values()) + new_tokens,
        block_size=cell["block_size"],
        tree_budget=cell["tree_budget"],
        prefill_chunk=cell["prefill_chunk"],
        drafter=Drafter(cell["drafter"], NOISE, 1),
    ) as engine:
        set_threads(engine, cell["threads"])
        results, committed, steps = [], 0, 0
        for run in plain.values():
            made, stats = record(engine, run.prompt, mode="ddtree", max_new_tokens=new_tokens, script=run.script)
            results.append(compare(made, run, run.tokens))
            committed, steps = committed + stats["committed"] - 1, steps + stats["steps"]
    return cell | {"avg_accept": round(committed / steps, 4)} | all_hold(results)


# ---- scenarios -------------------------------------------------------------------------------------------------------
def ends_inside_paths(setting: Setting, plain: Plain, block_size: int) -> Iterator[tuple[str, dict]]:
    """A limit and a stop token on every position of the first two accepted paths."""
    with setting.engine(context=len(plain.script), block_size=block_size, tree_budget=2 * block_size) as engine:
        limits, stops = [], []
        for end in range(1, min(2 * block_size + 2, len(plain.tokens))):
            made, stats = record(engine, plain.prompt, mode="ddtree", max_new_tokens=end, script=plain.script)
            limits.append(compare(made, plain, plain.tokens[:end]) | {"reason": stats["stop_reason"] == "length"})
            stop = int(plain.tokens[end - 1])
            first = plain.tokens.tolist().index(stop) + 1
            made, stats = record(
                engine,
                plain.prompt,
                mode="ddtree",
                max_new_tokens=len(plain.tokens),
                stop_token_ids=[stop],
                script=plain.script,
            )
            stops.append(compare(made, plain, plain.tokens[:first]) | {"reason": stats["stop_reason"] == "stop"})
    yield "limit inside a path", all_hold(limits)
    yield "stop token inside a path", all_hold(stops)
    with setting.engine(
        context=len(plain.prompt) + block_size + 1, block_size=block_size, tree_budget=2 * block_size
    ) as engine:
        made, stats = record(engine, plain.prompt, mode="ddtree", max_new_tokens=len(plain.tokens), script=plain.script)
        result = compare(made, plain, plain.tokens[: block_size + 1]) | {"reason": stats["stop_reason"] == "context"}
    yield "context ends inside a path", result


def with_head(bundle: OpenBundle, change) -> OpenBundle:
    """The bundle with another lm_head: `change` maps the rows of the old one."""
    head = bundle.tensors["lm_head.weight"]
    tensors = bundle.tensors | {"lm_head.weight": TensorView(head.dtype, np.ascontiguousarray(change(head.array)))}
    return dataclasses.replace(bundle, tensors=tensors)


def altered_heads(setting: Setting, plain: Plain, block_size: int) -> Iterator[tuple[str, dict]]:
    """A model whose first token is id 0, and one in which every logit stands twice: the lower token must win."""

    def token_zero(rows):
        order = np.arange(len(rows))
        order[[0, plain.tokens[0]]] = order[[plain.tokens[0], 0]]
        return rows[order]

    def pairs(rows):
        return rows[np.arange(len(rows)) & ~1]

    for name, change, holds in (
        ("token id 0", token_zero, lambda tokens: tokens[0] == 0),
        ("tied logits", pairs, lambda tokens: (tokens % 2 == 0).all()),
    ):
        altered = dataclasses.replace(setting, bundle=with_head(setting.bundle, change))
        (run,) = plain_runs(altered, {"": plain.prompt}, len(plain.tokens), block_size).values()
        results = []
        for drafter in ("oracle", "noisy", "adversarial"):
            with altered.engine(
                context=len(run.script),
                block_size=block_size,
                tree_budget=2 * block_size,
                drafter=Drafter(drafter, NOISE, 1),
            ) as engine:
                made, _ = record(engine, run.prompt, mode="ddtree", max_new_tokens=len(run.tokens), script=run.script)
                results.append(compare(made, run, run.tokens) | {"rule": bool(holds(made["tokens"]))})
        yield name, all_hold(results)


def long_run(setting: Setting, prompt: list[int], new_tokens: int, block_size: int) -> dict:
    """Many rounds: what a round leaves behind wrongly shows in a later one."""
    (plain,) = plain_runs(setting, {"": prompt}, new_tokens, block_size).values()
    with setting.engine(
        context=len(plain.script),
        block_size=block_size,
        tree_budget=2 * block_size,
        drafter=Drafter("noisy", NOISE, 1),
    ) as engine:
        made, _ = record(engine, prompt, mode="ddtree", max_new_tokens=new_tokens, script=plain.script)
    return compare(made, plain, plain.tokens) | {"tokens": len(made["tokens"]) == new_tokens}


def write(content: dict, output: Path) -> None:
    write_text(output, json.dumps(content, indent=1) + "\n")


def merge(files: list[Path]) -> dict:
    """{"<backend>.<activations>": that variant's matrix}: its folder's name."""
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--merge", nargs="+", type=Path, help="the variants' matrices: nothing is run")
    parser.add_argument("--library")
    parser.add_argument("--bundle")
    parser.add_argument("--golden", help="whose prompts to decode")
    parser.add_argument("--activations", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--axes", type=json.loads, help=f"values of {', '.join(AXES)}")
    parser.add_argument("--cover", choices=("all", "pairs"), default="all")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--long", type=int, default=0, help="new tokens of the long run; 0 = none")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.merge:
        write(merge(args.merge), args.output)
        return 0
    for name in ("library", "bundle", "golden", "axes"):
        if getattr(args, name) is None:
            parser.error(f"--{name}: missing")

    setting = Setting(args.library, open_bundle(args.bundle), args.activations)
    goldens = read_goldens(args.golden)
    prompts = {name: golden.prompt.tolist() for name, golden in goldens.items()}
    chosen, largest = cells(args.axes, args.cover), max(args.axes["block_size"])
    plain = plain_runs(setting, prompts, args.new_tokens, largest)
    scenario_run = max(plain.values(), key=lambda run: len(set(run.tokens.tolist())))
    begin, done, failed = time.perf_counter(), [], []

    def note(what, result):
        if not all(value for value in result.values() if isinstance(value, bool)):
            failed.append(f"{what}: {json.dumps(result)}")
            print(f"FAILED {failed[-1]}", file=sys.stderr)
        return result

    for index, cell in enumerate(chosen, 1):
        done.append(note("cell", run_cell(setting, plain, cell)))
        if index % 50 == 0 or index == len(chosen):
            print(f"{index}/{len(chosen)} cells, {time.perf_counter() - begin:.0f} s", flush=True)
    scenarios = {}
    for name, result in itertools.chain(
        ends_inside_paths(setting, scenario_run, min(8, largest)),
        altered_heads(setting, scenario_run, min(8, largest)),
    ):
        scenarios[name] = note(name, result)
    if args.long:
        scenarios[f"{args.long} new tokens"] = note(
            "long run", long_run(setting, scenario_run.prompt, args.long, min(8, largest))
        )
    print(f"{len(chosen)} cells x {len(prompts)} prompts, {len(scenarios)} scenarios: {len(failed)} failed")
    if failed:
        return 1
    write({"cover": args.cover, "prompts": list(prompts), "scenarios": scenarios, "cells": done}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
