"""Drafters of generated models: they turn the sequence that plain decoding yields into block logits."""

from collections.abc import Sequence

import numpy as np

SEED, POSITION, LEVEL, TOKEN = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)


def mix(z: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * POSITION
    z = (z ^ (z >> np.uint64(27))) * LEVEL
    return z ^ (z >> np.uint64(31))


def draft_script(
    kind: str, p: float, seed: int, script: Sequence[int], prefix: int, levels: int, vocab: int
) -> np.ndarray:
    """float32 logits [levels, vocab] of positions prefix + 1 + level; `script` is prompt and continuation.

    oracle       the script's token first, every other token equal
    noisy        with probability p a level's first choice is wrong: the script's token is second, third or lost
    adversarial  never the script's token
    Past the script all tokens are equal.
    """
    logits = np.zeros((levels, vocab), np.float32)
    for level in range(levels):
        position = prefix + 1 + level
        if position >= len(script):
            break
        right, row = script[position], logits[level]

        def hash_of(tokens, position=position, level=level) -> np.ndarray:
            with np.errstate(over="ignore"):
                tokens = np.atleast_1d(np.asarray(tokens, np.int64) + 8).astype(np.uint64)
                return mix(
                    np.uint64(seed % 2**64) * SEED
                    + np.uint64(position) * POSITION
                    + np.uint64(level) * LEVEL
                    + tokens * TOKEN
                )

        def uniform(tokens, hash_of=hash_of) -> np.ndarray:
            """In [0, 1), a multiple of 2^-24."""
            return (hash_of(tokens) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)

        if kind == "oracle":
            row[right] = 8
        elif kind == "adversarial":
            row[:] = 4 * uniform(np.arange(vocab))
            row[right] = -np.inf
        elif kind == "noisy":
            row[:] = 4 * uniform(np.arange(vocab))
            decoy = [(right + 1 + int(hash_of(-3 - i)[0]) % (vocab - 1)) % vocab for i in (0, 1)]
            wrong = ("second", "third", "lost")[int(hash_of(-2)[0]) % 3]
            case = wrong if uniform(-1)[0] < np.float32(p) else "right"
            if case != "lost":
                row[right] = 8
            if case != "right":
                row[decoy[0]] = 9
            if case == "third":
                row[decoy[1]] = 10
        else:
            raise ValueError(f"drafter.kind: {kind}: not oracle, noisy or adversarial")
    return logits
