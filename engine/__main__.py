"""The command line: generate from a bundle or a checkpoint, convert one into the other, plan for a checkpoint."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engine.api import Engine, Generation, Progress, text_of
from engine.bundle import BundleError, open_bundle
from engine.checkpoint import CheckpointError, open_checkpoint
from engine.export import SHARD_BYTES, ExportError, export_bundle, import_checkpoint
from engine.native import DRAFTERS, BackendError, Drafter, EngineError
from engine.plan import as_text, parse_size, read_plan
from engine.text import Text, UsageError
from engine.tokenizer import TextError

REPORT_SECONDS = 0.5  # between two words on progress


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, as everything here does."""

    def error(self, message):
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")


def token_ids(text: str) -> list[int]:
    """5,17,… -> [5, 17, …]"""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be token ids separated by commas") from None


def layer_range(text: str) -> range:
    """0:4 -> range(0, 4)"""
    begin, colon, end = text.partition(":")
    if not colon or not begin.isdecimal() or not end.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a range of layers such as 0:4")
    return range(int(begin), int(end))


def size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> argparse.ArgumentParser:
    root = Parser(prog="python -m engine", description="Native speculative decoding.")
    commands = root.add_subparsers(dest="command", required=True)

    generate = commands.add_parser("generate", help="decode one prompt")
    model = generate.add_mutually_exclusive_group(required=True)
    model.add_argument("--bundle", help="results/bundles/<bundle>.safetensors")
    model.add_argument("--checkpoint", help="a folder as released: config.json, safetensors, tokenizer")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text; a bundle's tokens are its UTF-8 bytes")
    prompt.add_argument("--prompt-tokens", type=token_ids, metavar="5,17,…")
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    generate.add_argument("--system", help="with --chat: the system message")
    generate.add_argument("--layers", type=layer_range, metavar="0:4", help="load only these layers of a checkpoint")
    generate.add_argument("--mode", choices=("ar", "ddtree"), help="default: ddtree, but ar for a checkpoint")
    generate.add_argument("--max-new-tokens", type=int, default=24)
    generate.add_argument("--stop-token-ids", type=token_ids, metavar="2,…", help="default: those of the checkpoint")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a string that ends the output")
    generate.add_argument("--block-size", type=int, default=8, help="a drafter call yields one level less")
    generate.add_argument("--tree-budget", type=int, default=16, help="most nodes of a draft tree")
    generate.add_argument("--drafter", choices=sorted(DRAFTERS), default="oracle")
    generate.add_argument("--drafter-p", type=float, default=0.0,
                          help="noisy: how often a level's first choice is wrong")  # fmt: skip
    generate.add_argument("--drafter-seed", type=int, default=0)
    generate.add_argument("--activations", choices=("float32", "bfloat16"), default="float32")
    generate.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    generate.add_argument("--library", metavar="FILE", help="default: the one that the ladder built for --device")
    generate.add_argument("--json", action="store_true", help="one JSON object: tokens, text, stop_reason, stats")
    generate.set_defaults(run=run_generate)

    export = commands.add_parser("export", help="a bundle -> a Hugging Face folder")
    export.add_argument("--bundle", required=True)
    export.add_argument("--output", required=True, help="a new folder")
    export.add_argument("--shard-size", type=size, default=SHARD_BYTES, metavar="5GB")
    export.set_defaults(run=run_export)

    back = commands.add_parser("import", help="a Hugging Face folder -> a bundle")
    back.add_argument("--checkpoint", required=True)
    back.add_argument("--layers", type=layer_range, metavar="0:4", help="only these layers")
    back.add_argument("--output", required=True, type=Path)
    back.set_defaults(run=run_import)

    plan = commands.add_parser("plan", help="what each GPU would hold, from config.json alone")
    plan.add_argument("--checkpoint", required=True)
    plan.add_argument("--gpus", type=int, default=1)
    plan.add_argument("--memory", type=size, default=0, metavar="96GB", help="of a GPU")
    plan.add_argument("--context", type=int, default=32768, help="tokens of one sequence")
    plan.add_argument("--parallel", choices=("tp", "ep", "pp"), default="pp")
    plan.add_argument("--bandwidth", type=size, default=4_800_000_000_000, metavar="4.8TB/s", help="of its memory")
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run=run_plan)
    return root


def require_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise UsageError(f"{name}: {value}: must be at least {least}")


def prompt_tokens(args, text: Text) -> list[int]:
    """The prompt as the options give it; stop tokens are checked by the way."""
    for token in args.stop_token_ids or []:
        if not 0 <= token < text.vocab_size:
            raise UsageError(f"stop_token_ids: {token}: outside the vocabulary of {text.vocab_size}")
    for name in ("prompt", "system"):
        try:
            (getattr(args, name) or "").encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name}: {getattr(args, name)!a}: is no UTF-8") from None
    if args.prompt is None:
        try:
            return text.encode(args.prompt_tokens)
        except UsageError as error:
            raise UsageError(str(error).replace("prompt:", "prompt_tokens:", 1)) from None
    if not args.chat:
        return text.encode(args.prompt)
    system = [{"role": "system", "content": args.system}] if args.system else []
    return text.encode_chat([*system, {"role": "user", "content": args.prompt}])


def run_generate(args) -> None:
    require_at_least(1, max_new_tokens=args.max_new_tokens, block_size=args.block_size)
    require_at_least(0, tree_budget=args.tree_budget)
    if not 0 <= args.drafter_p <= 1:
        raise UsageError(f"drafter_p: {args.drafter_p}: must lie in 0…1")
    if args.bundle and args.layers:
        raise UsageError(f"layers: {args.layers.start}:{args.layers.stop}: only a checkpoint can be opened in part")
    model = open_bundle(args.bundle) if args.bundle else open_checkpoint(args.checkpoint, args.layers)
    prompt = prompt_tokens(args, text_of(model))
    most = model.config.max_position_embeddings
    if len(prompt) + args.max_new_tokens > most:
        raise UsageError(f"max_new_tokens: {args.max_new_tokens}: with a prompt of {len(prompt)} tokens more than "
                         f"max_position_embeddings ({most})")  # fmt: skip
    mode = args.mode or ("ddtree" if args.bundle else "ar")
    with (
        loading_report() as on_progress,
        Engine(
            model,
            device=args.device,
            library=args.library,
            activations=args.activations,
            context=len(prompt) + args.max_new_tokens,
            block_size=args.block_size,
            tree_budget=args.tree_budget,
            drafter=Drafter(args.drafter, args.drafter_p, args.drafter_seed),
            on_progress=on_progress,
        ) as engine,
    ):
        options = {"mode": mode, "max_new_tokens": args.max_new_tokens, "stop": args.stop,
                   "stop_token_ids": args.stop_token_ids}  # fmt: skip
        with engine.stream(prompt, **options) as stream:
            for piece in stream:
                if not args.json:
                    print(piece.text, end="", flush=True)
        stats = {"backend": engine.backend, "activations": engine.activations, "mode": mode}
        report(stream.result, stats, args.json)


def report(result: Generation, stats: dict, as_json: bool) -> None:
    stats = stats | dataclasses.asdict(result.stats)
    if as_json:
        output = {"tokens": result.tokens, "text": result.text, "stop_reason": result.stop_reason, "stats": stats}
        print(json.dumps(output, ensure_ascii=False))
    else:
        print()
        shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in stats.items()}
        print(f"{result.stop_reason}: " + ", ".join(f"{name} {value}" for name, value in shown.items()),
              file=sys.stderr)  # fmt: skip


@contextlib.contextmanager
def loading_report() -> Iterator:
    """Yields what prints loading's progress to stderr, if it takes longer than a moment."""
    last = time.perf_counter()

    def on_progress(progress: Progress) -> None:
        nonlocal last
        if (now := time.perf_counter()) - last < REPORT_SECONDS:
            return
        last, rate = now, progress.loaded / progress.seconds
        left = (progress.total - progress.loaded) / rate
        print(f"loading {progress.loaded / 1e9:.1f} of {progress.total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, "
              f"{left // 60:.0f}:{left % 60:02.0f} left", file=sys.stderr)  # fmt: skip

    yield on_progress


def run_export(args) -> None:
    require_at_least(1, shard_size=args.shard_size)
    bundle = open_bundle(args.bundle)
    shards = export_bundle(bundle, args.output, args.shard_size)
    print(f"exported {len(bundle.tensors)} tensors, {bundle.n_bytes} bytes, {len(shards)} shards: {args.output}")


def run_import(args) -> None:
    checkpoint = open_checkpoint(args.checkpoint, args.layers)
    n_bytes = import_checkpoint(checkpoint).write(args.output)
    skipped = "".join(f", skipped {n} × {kind}" for kind, n in checkpoint.skipped.items())
    print(f"imported {len(checkpoint.tensors)} tensors, {n_bytes} bytes{skipped}: {args.output}")


def run_plan(args) -> None:
    require_at_least(1, gpus=args.gpus, context=args.context, bandwidth=args.bandwidth)
    plan = read_plan(args.checkpoint, gpus=args.gpus, memory=args.memory, context=args.context, parallel=args.parallel,
                     bandwidth=args.bandwidth)  # fmt: skip
    if args.json:
        print(json.dumps(dataclasses.asdict(plan), default=lambda layers: [layers.start, layers.stop]))
    else:
        print(as_text(plan, args.memory, args.context, args.bandwidth))


def main() -> int:
    args = parser().parse_args()
    try:
        args.run(args)
        sys.stdout.flush()
    except UsageError as error:
        name, colon, rest = str(error).partition(":")
        print(f"error: --{name.replace('_', '-')}{colon}{rest}", file=sys.stderr)
        return 2
    except (BackendError, BundleError, CheckpointError, TextError, ExportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"error: {args.bundle or args.checkpoint}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename or getattr(args, "output", "standard output")
        print(f"error: {where}: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer has nowhere to go
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
