"""Greedy decoding over a latent KV cache, autoregressive (AR) and with a draft tree: the same tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from reference import ops
from reference.ddtree import Tree, accept, build_tree, compact, log_probs_top_k
from reference.model import chain

ROOT = Tree(*(np.array([x], np.int32) for x in (-1, -1, 0)))


class Target(Protocol):
    """What decoding needs of a model (reference/model.py)."""

    def empty_kv(self, rows: int) -> np.ndarray: ...

    def forward(self, tokens: np.ndarray, kv: np.ndarray, prefix: int, parents: np.ndarray) -> np.ndarray: ...


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)  # after the cut; a stop token is kept
    logits: list[np.ndarray] = field(default_factory=list)  # [vocab] each: those that chose the token
    committed: int = 0  # before the cut: accepted nodes and bonus tokens
    steps: int = 0  # rounds after the one that yields the first token

    def commit(self, tokens: list[int], logits: np.ndarray, limit: int, stop_ids: Sequence[int]) -> bool:
        """Appends a round's tokens up to a stop token or the limit; true if that ends the output."""
        if -1 in tokens:
            raise FloatingPointError(f"token {len(self.tokens) + tokens.index(-1)}: all logits are NaN")
        self.committed += len(tokens)
        for token, row in zip(tokens, logits, strict=True):
            self.tokens.append(token)
            self.logits.append(row)
            if token in stop_ids or len(self.tokens) == limit:
                return True
        return False


def prefill(target: Target, prompt: Sequence[int], pool_rows: int) -> np.ndarray:
    """The KV of all tokens but the last, which is the first root."""
    kv = target.empty_kv(pool_rows)
    if len(prompt) > 1:
        target.forward(np.array(prompt[:-1]), kv, 0, chain(len(prompt) - 1))
    return kv


def decode_ar(target: Target, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int] = ()) -> Output:
    """One token a step."""
    kv = prefill(target, prompt, len(prompt) + max_new_tokens)
    prefix, token, output = len(prompt) - 1, prompt[-1], Output()
    while True:
        logits = target.forward(np.array([token]), kv, prefix, ROOT.parents)
        token = int(ops.argmax(logits)[0])
        if output.commit([token], logits, max_new_tokens, stop_ids):
            return output
        prefix += 1
        output.steps += 1


def decode_ddtree(
    target: Target,
    prompt: Sequence[int],
    max_new_tokens: int,
    draft: Callable[[int], np.ndarray],
    budget: int,
    stop_ids: Sequence[int] = (),
) -> Output:
    """One tree a step. draft(prefix) -> logits [levels, vocab] of positions prefix + 1 + level; the root's
    position is `prefix`."""
    kv = prefill(target, prompt, len(prompt) + max_new_tokens + budget + 1)
    prefix, root, tree, output = len(prompt) - 1, prompt[-1], ROOT, Output()
    while True:
        tokens = np.array([root, *tree.tokens[1:]])
        logits = target.forward(tokens, kv, prefix, tree.parents)
        rows, committed = accept(tokens, tree.parents, ops.argmax(logits))
        if output.commit(committed, logits[rows], max_new_tokens, stop_ids):
            return output
        compact(kv, prefix, rows)
        prefix, root = prefix + len(rows), committed[-1]
        logits = draft(prefix)
        tree = build_tree(*log_probs_top_k(logits, min(budget, logits.shape[-1])), budget)
        output.steps += 1
