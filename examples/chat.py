"""A conversation with a checkpoint: text as it comes, and how little of each turn's prompt is computed anew.

python examples/chat.py CHECKPOINT [--device cpu|cuda] [QUESTION …]      without questions: from stdin
"""

import argparse
import sys

import engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a folder with config.json, safetensors, a tokenizer and a chat template")
    parser.add_argument("questions", nargs="*")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--library", help="default: the one that the ladder built for --device")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()

    with engine.Engine(args.checkpoint, device=args.device, library=args.library) as model:
        messages = []
        for question in args.questions or map(str.strip, sys.stdin):
            messages.append({"role": "user", "content": question})
            print(f"> {question}")
            with model.stream(model.encode_chat(messages), max_new_tokens=args.max_new_tokens) as answer:
                for piece in answer:
                    print(piece.text, end="", flush=True)
            stats = answer.result.stats
            messages.append({"role": "assistant", "content": answer.result.text})
            print(f"\n[{stats.prompt_tokens} prompt tokens, {stats.kept_tokens} of them kept from before; "
                  f"{stats.tokens_per_second:.1f} tokens/s]")  # fmt: skip


if __name__ == "__main__":
    main()
