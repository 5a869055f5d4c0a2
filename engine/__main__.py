"""python -m engine generate --bundle FILE …: decodes one prompt and prints it."""

import argparse
import json
import sys
import time
from pathlib import Path

from engine.bundle import BundleError, OpenBundle, open_bundle
from engine.native import DRAFTERS, Drafter, Engine, EngineError

BYTES = 256  # a text prompt is its UTF-8 bytes as tokens


class UsageError(ValueError):
    """An argument that cannot be used: `<argument>: <value>: <reason>`."""


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


def parser() -> argparse.ArgumentParser:
    root = Parser(prog="python -m engine", description="Native speculative decoding.")
    generate = root.add_subparsers(dest="command", required=True).add_parser("generate", help="decode one prompt")
    generate.add_argument("--bundle", required=True, help="results/bundles/<bundle>.safetensors")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text; its UTF-8 bytes are the tokens")
    prompt.add_argument("--prompt-tokens", type=token_ids, metavar="5,17,…")
    generate.add_argument("--mode", choices=("ar", "ddtree"), default="ddtree")
    generate.add_argument("--max-new-tokens", type=int, default=24)
    generate.add_argument("--stop-token-ids", type=token_ids, default=[], metavar="2,…")
    generate.add_argument("--block-size", type=int, default=8, help="a drafter call yields one level less")
    generate.add_argument("--tree-budget", type=int, default=16, help="most nodes of a draft tree")
    generate.add_argument("--drafter", choices=sorted(DRAFTERS), default="oracle")
    generate.add_argument("--drafter-p", type=float, default=0.0, help="noisy: how often a level's first choice is wrong")
    generate.add_argument("--drafter-seed", type=int, default=0)
    generate.add_argument("--activations", choices=("float32", "bfloat16"), default="float32")
    generate.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    generate.add_argument("--json", action="store_true", help="one JSON object: tokens, text, stop_reason, stats")
    return root


def find_library(device: str) -> Path:
    """The library that the ladder built for `device`; auto prefers CUDA where it was built."""
    build = Path(__file__).resolve().parent.parent / "results" / "build"
    for backend in ("cuda", "cpu") if device == "auto" else (device,):
        library = build / backend / f"libkdtree_{backend}.so"
        if library.exists():
            return library
    raise UsageError(f"--device: {device}: no library under results/build; build it with the ladder first")


def prompt_tokens(args, bundle: OpenBundle) -> list[int]:
    vocab = bundle.config.vocab_size
    if args.prompt is not None:
        if vocab < BYTES:
            raise UsageError(f"--prompt: {args.prompt!r}: text needs a vocabulary of 256, this model's is {vocab}")
        tokens = list(args.prompt.encode())
    else:
        tokens = args.prompt_tokens
    if not tokens:
        raise UsageError("--prompt: empty: needs at least one token")
    for name, ids in (("--prompt-tokens", tokens), ("--stop-token-ids", args.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab:
                raise UsageError(f"{name}: {token}: outside the vocabulary of {vocab}")
    return tokens


def check_numbers(args, bundle: OpenBundle, prompt_length: int) -> None:
    for name, value, least in (("--max-new-tokens", args.max_new_tokens, 1), ("--block-size", args.block_size, 1),
                               ("--tree-budget", args.tree_budget, 0)):
        if value < least:
            raise UsageError(f"{name}: {value}: must be at least {least}")
    if not 0 <= args.drafter_p <= 1:
        raise UsageError(f"--drafter-p: {args.drafter_p}: must lie in 0…1")
    most = bundle.config.max_position_embeddings
    if prompt_length + args.max_new_tokens > most:
        raise UsageError(f"--max-new-tokens: {args.max_new_tokens}: with a prompt of {prompt_length} tokens more than "
                         f"max_position_embeddings ({most})")


def as_text(tokens: list[int]) -> str:
    """Tokens that are bytes as UTF-8, every other as U+FFFD."""
    return b"".join(bytes([t]) if t < BYTES else "\ufffd".encode() for t in tokens).decode(errors="replace")


def generate(args) -> dict:
    bundle = open_bundle(args.bundle)
    prompt = prompt_tokens(args, bundle)
    check_numbers(args, bundle, len(prompt))
    with Engine(find_library(args.device), bundle, context=len(prompt) + args.max_new_tokens,
                block_size=args.block_size, tree_budget=args.tree_budget, activations=args.activations,
                drafter=Drafter(args.drafter, args.drafter_p, args.drafter_seed)) as engine:
        script = []
        if args.mode == "ddtree":  # drafters of generated models draft from what plain decoding yields
            rounds = []
            plain = engine.generate(prompt, mode="ar", max_new_tokens=args.max_new_tokens, overrun=args.block_size,
                                    stop_token_ids=args.stop_token_ids, on_round=rounds.append)
            script = prompt + plain.tokens + [t for round_ in rounds if round_.overrun for t in round_.tokens]
        begin = time.perf_counter()
        result = engine.generate(prompt, mode=args.mode, max_new_tokens=args.max_new_tokens, script=script,
                                 stop_token_ids=args.stop_token_ids)
        seconds = time.perf_counter() - begin
        stats = {"backend": engine.backend, "activations": args.activations, "mode": args.mode,
                 "steps": result.steps, "committed": result.committed,
                 "avg_accept": (result.committed - 1) / result.steps if result.steps else 0.0,
                 "tokens_per_second": len(result.tokens) / seconds}
    return {"tokens": result.tokens, "text": as_text(result.tokens), "stop_reason": result.stop_reason, "stats": stats}


def main() -> int:
    args = parser().parse_args()
    try:
        output = generate(args)
    except (BundleError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"error: {args.bundle}: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(output, ensure_ascii=False))
    else:
        print(output["text"])
        print(", ".join(f"{name} {value}" for name, value in output["stats"].items()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
