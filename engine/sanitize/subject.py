"""What runs inside the sanitized process: python -m engine.sanitize.subject LIBRARY OPERATOR|decode [BUNDLE …]

Prints how many measurements or decodings were made; 0 if this CPU lacks the path that KDTREE_CPU names. What they
measured is the business of the release library's checks; here only the sanitizer speaks, by ending the process.
"""

import sys

from engine import operators
from engine.bundle import open_bundle
from engine.check import check
from engine.native import Drafter, Engine

NEW_TOKENS, BLOCK, BUDGET, CHUNK = 12, 4, 9, 5
PROMPT = range(1, 2 * CHUNK + 3)  # two full chunks of prefill and a part


def check_operator(library: str, name: str) -> int:
    operators.GUARD_BYTES = 0  # the sanitizer's own guards stand there, and see reads too
    return len(check(operators.Library(library), name))


def decode(library: str, bundle_file: str) -> int:
    """Plain and tree decoding with both types of activations and a drafter that is right and wrong in turns."""
    bundle, runs = open_bundle(bundle_file), 0
    prompt = [token % bundle.config.vocab_size for token in PROMPT]
    for activations in ("float32", "bfloat16"):
        with Engine(
            library,
            bundle,
            context=len(prompt) + NEW_TOKENS,
            block_size=BLOCK,
            tree_budget=BUDGET,
            prefill_chunk=CHUNK,
            activations=activations,
            drafter=Drafter("noisy", 0.5, 1),
        ) as engine:
            plain = engine.generate(prompt, mode="ar", max_new_tokens=NEW_TOKENS, record=True, overrun=BLOCK)
            engine.generate(prompt, mode="ddtree", max_new_tokens=NEW_TOKENS, record=True, script=prompt + plain.tokens)
            engine.read_kv(len(prompt))
            runs += 2
    return runs


def main(library: str, subject: str, *bundles: str) -> None:
    try:
        operators.Library(library)
    except operators.OperatorError as error:
        if "does not have its instructions" not in str(error):
            raise
        print(0)
        return
    if subject == "decode":
        print(sum(decode(library, bundle) for bundle in bundles))
    else:
        print(check_operator(library, subject))


if __name__ == "__main__":
    main(*sys.argv[1:])
