"""DDTree yields what AR yields, whatever the drafter proposes."""

import hashlib
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import ops
from reference.decode import decode_ar, decode_ddtree
from reference.drafters import draft_script
from reference.model import Model, chain
from reference.quantize import quantize_bundle

VOCAB = 5
KINDS = ["oracle", "noisy", "adversarial"]


class TiedTarget:
    """A target whose logits are 0, 1 or 2 (ties abound) by a hash of all tokens before, read from the KV cache: a
    row left at the wrong place changes all that follows. Checks that every token stands at its position."""

    def empty_kv(self, rows):
        return np.full((1, rows, 2), -1.0)  # token, position

    def forward(self, tokens, kv, prefix, parents):
        assert 0 <= min(tokens) and max(tokens) < VOCAB
        kv[0, prefix : prefix + len(tokens)] = np.stack((tokens, prefix + ops.depths(parents)), axis=1)
        logits = np.empty((len(tokens), VOCAB))
        for row in range(len(tokens)):
            seen = kv[0, [*range(prefix), *(prefix + r for r in ops.path_to(parents, row))]]
            assert np.array_equal(seen[:, 1], np.arange(len(seen)))
            digest = hashlib.sha256(seen[:, 0].astype(np.uint8).tobytes()).digest()
            logits[row] = [digest[token] % 3 for token in range(VOCAB)]
        return logits


def check_equal(output, want):
    assert output.tokens == want.tokens
    np.testing.assert_allclose(output.logits, want.logits, atol=1e-12)


@settings(deadline=None, max_examples=150)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    max_new_tokens=st.integers(1, 20),
    stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=2),
    kind=st.sampled_from([*KINDS, "random", "tied"]),
    levels=st.integers(0, 5),
    budget=st.integers(0, 12),
    seed=st.integers(0, 3),
)
def test_ddtree_equals_ar(prompt, max_new_tokens, stop_ids, kind, levels, budget, seed):
    ar = decode_ar(TiedTarget(), prompt, max_new_tokens, stop_ids)
    script = prompt + decode_ar(TiedTarget(), prompt, max_new_tokens).tokens
    draft = {
        "random": lambda prefix: np.random.default_rng((seed, prefix)).standard_normal((levels, VOCAB)),
        "tied": lambda prefix: np.random.default_rng((seed, prefix)).integers(0, 2, (levels, VOCAB)) * 1.0,
    }.get(kind, lambda prefix: draft_script(kind, 0.5, seed, script, prefix, levels, VOCAB))
    check_equal(decode_ddtree(TiedTarget(), prompt, max_new_tokens, draft, budget, stop_ids), ar)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("int4", [False, True], ids=["float", "int4"])
def test_ddtree_equals_ar_on_a_model(small_bundle, kind, int4):
    model = Model(quantize_bundle(small_bundle, 32) if int4 else small_bundle)
    prompt = [3, 1, 4, 1, 5]
    ar = decode_ar(model, prompt, 24)
    draft = partial(draft_script, kind, 0.5, 1, prompt + ar.tokens, levels=7, vocab=64)
    output = decode_ddtree(model, prompt, 24, draft, 16)
    check_equal(output, ar)
    if kind == "oracle":  # one token from prefill, then whole blocks of 8
        assert (output.steps, output.committed) == (3, 25)
    if kind == "adversarial":
        assert (output.steps, output.committed) == (23, 24)


def test_ar_is_the_argmax_of_a_full_recompute(small_bundle):
    model, tokens = Model(small_bundle), [9, 2]
    output = decode_ar(model, tokens, 10)
    for token, logits in zip(output.tokens, output.logits, strict=True):
        full = model.forward(np.array(tokens), model.empty_kv(len(tokens)), 0, chain(len(tokens)))[-1]
        np.testing.assert_allclose(logits, full, atol=1e-12)
        assert token == full.argmax()
        tokens.append(token)
    assert (output.steps, output.committed) == (9, 10)


@pytest.mark.parametrize("position", range(12))
def test_stop_token_anywhere_in_an_accepted_path(position):
    """The oracle accepts whole blocks of 4, so that a stop token falls on every place inside one; it is kept."""
    target, prompt = TiedTarget(), [1]
    tokens = decode_ar(target, prompt, 12).tokens
    stop = tokens[position]
    draft = partial(draft_script, "oracle", 0.0, 0, prompt + tokens, levels=3, vocab=VOCAB)
    output = decode_ddtree(target, prompt, 12, draft, 3, [stop])
    assert output.tokens == tokens[: tokens.index(stop) + 1] == decode_ar(target, prompt, 12, [stop]).tokens


@pytest.mark.parametrize("limit", range(1, 10))
def test_limit_anywhere_in_an_accepted_path(limit):
    target, prompt = TiedTarget(), [1]
    tokens = decode_ar(target, prompt, 12).tokens
    draft = partial(draft_script, "oracle", 0.0, 0, prompt + tokens, levels=3, vocab=VOCAB)
    output = decode_ddtree(target, prompt, limit, draft, 3)
    assert output.tokens == tokens[:limit]
    assert output.committed == 1 + 4 * output.steps >= limit  # before the cut


def test_nan_logits_stop_the_run():
    class Broken(TiedTarget):
        def forward(self, tokens, kv, prefix, parents):
            return super().forward(tokens, kv, prefix, parents) * (np.nan if prefix > 2 else 1)

    for decode in (decode_ar, partial(decode_ddtree, draft=lambda prefix: np.zeros((2, VOCAB)), budget=3)):
        with pytest.raises(FloatingPointError, match=r"token \d+: all logits are NaN"):
            decode(Broken(), [1], 12)
