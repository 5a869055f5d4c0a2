import numpy as np
import pytest

from reference.ddtree import log_probs_top_k
from reference.drafters import draft_script

VOCAB, LEVELS = 50, 7
SCRIPT = np.random.default_rng(0).integers(0, VOCAB, 3000).tolist()
MASK = 2**64 - 1


def hash_of(seed, position, level, token):
    """The hash in Python's unbounded integers."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + level * 0x94D049BB133111EB
         + (token + 8) * 0xD6E8FEB86659FD93) & MASK  # fmt: skip
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & MASK
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def level_in_plain_python(kind, p, seed, position, level):
    if position >= len(SCRIPT):
        return [0.0] * VOCAB
    right = SCRIPT[position]
    if kind == "oracle":
        return [8.0 if token == right else 0.0 for token in range(VOCAB)]

    def u(token):
        return (hash_of(seed, position, level, token) >> 40) / 2**24

    row = [4 * u(token) for token in range(VOCAB)]
    if kind == "adversarial":
        row[right] = -np.inf
        return row
    if u(-1) >= np.float32(p):
        row[right] = 8.0
        return row
    r = hash_of(seed, position, level, -2) % 3
    decoys = [(right + 1 + hash_of(seed, position, level, -3 - i) % (VOCAB - 1)) % VOCAB for i in range(2)]
    if r < 2:
        row[right] = 8.0
    row[decoys[0]] = 9.0
    if r == 1:
        row[decoys[1]] = 10.0
    return row


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
@pytest.mark.parametrize("kind", ["oracle", "noisy", "adversarial"])
def test_against_plain_python(kind, seed):
    for prefix in (0, 1, 17, len(SCRIPT) - 4, len(SCRIPT) + 5):
        logits = draft_script(kind, 0.6, seed, SCRIPT, prefix, LEVELS, VOCAB)
        assert logits.dtype == np.float32 and logits.shape == (LEVELS, VOCAB)
        for level in range(LEVELS):
            assert logits[level].tolist() == level_in_plain_python(kind, 0.6, seed, prefix + 1 + level, level)


def ranks_of_the_right_token(kind, p):
    logits = draft_script(kind, p, 3, SCRIPT, 0, len(SCRIPT) - 1, VOCAB)
    tokens, _ = log_probs_top_k(logits, VOCAB)
    return (tokens == np.array(SCRIPT[1:])[:, None]).argmax(axis=1)


def test_oracle_is_always_right():
    assert (ranks_of_the_right_token("oracle", 0.0) == 0).all()


def test_adversarial_is_never_right():
    assert (ranks_of_the_right_token("adversarial", 0.0) == VOCAB - 1).all()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_noisy_is_wrong_with_probability_p(p):
    ranks = ranks_of_the_right_token("noisy", p)
    share = np.bincount(np.minimum(ranks, 3), minlength=4) / len(ranks)
    np.testing.assert_allclose(share, [1 - p, p / 3, p / 3, p / 3], atol=0.03)


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"^drafter\.kind: psychic: not oracle, noisy or adversarial$"):
        draft_script("psychic", 0.0, 0, SCRIPT, 0, 1, VOCAB)
