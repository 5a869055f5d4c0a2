"""DDTree (Ringel and Romano, arXiv 2604.12989): best-first draft tree, greedy accept, compaction."""

import heapq
from typing import NamedTuple

import numpy as np


class Tree(NamedTuple):
    """A draft tree in pop order, int32 [1 + nodes] each. Row 0 is the root; the builder does not know its token."""

    tokens: np.ndarray  # root: -1
    parents: np.ndarray  # root: -1; else a smaller row
    depths: np.ndarray  # root: 0


def log_probs_top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """logits [levels, vocab] -> (tokens int32, log-probs float32) [levels, k], largest first, ties: lower token.

    A NaN makes the whole level's log-probs NaN (for the order of the tokens it counts as -inf).
    """
    x = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        x = x - x.max(axis=-1, keepdims=True)
        log_probs = (x - np.log(np.exp(x).sum(axis=-1, keepdims=True))).astype(np.float32)
    tokens = np.argsort(-np.where(np.isnan(logits), -np.inf, logits), axis=-1, kind="stable")[:, :k]
    return tokens.astype(np.int32), np.take_along_axis(log_probs, tokens, axis=-1)


def build_tree(top_tokens: np.ndarray, top_log_probs: np.ndarray, budget: int) -> Tree:
    """Algorithm 1: the `budget` most probable prefixes of the product of the levels' distributions.

    top_tokens and top_log_probs [levels, k], log-probs descending. Score = parent's score + log-prob, one
    float32 add; highest first, equal scores by the lexicographically smaller rank tuple; -inf and NaN are
    never pushed.
    """
    levels, k = top_log_probs.shape
    tokens, parents, depths = [-1], [-1], [0]
    heap: list[tuple] = []  # (-score, rank at each depth, parent's row, parent's score)

    def push(ranks: tuple[int, ...], parent: int, parent_score: np.float32) -> None:
        depth, rank = len(ranks), ranks[-1]
        if depth <= levels and rank < k:
            score = parent_score + top_log_probs[depth - 1, rank]
            if score > -np.inf:
                heapq.heappush(heap, (-score, ranks, parent, parent_score))

    push((0,), 0, np.float32(0))
    while heap and len(tokens) <= budget:
        score, ranks, parent, parent_score = heapq.heappop(heap)
        row = len(tokens)
        tokens.append(top_tokens[len(ranks) - 1, ranks[-1]])
        parents.append(parent)
        depths.append(len(ranks))
        push((*ranks[:-1], ranks[-1] + 1), parent, parent_score)  # next sibling
        push((*ranks, 0), row, -score)  # first child
    return Tree(*(np.array(x, np.int32) for x in (tokens, parents, depths)))


def accept(tokens: np.ndarray, parents: np.ndarray, next_tokens: np.ndarray) -> tuple[list[int], list[int]]:
    """Walks from the root to the child that holds the target's choice, while there is one.

    tokens, parents and next_tokens (the target's choice after each row), [rows] -> (rows of the path, root
    first, ascending; committed tokens: those of the matched nodes, then the bonus token, the next root).
    """
    child = {(int(parents[row]), int(tokens[row])): row for row in range(1, len(tokens))}
    path, committed = [0], [int(next_tokens[0])]
    while (path[-1], committed[-1]) in child:
        path.append(child[path[-1], committed[-1]])
        committed.append(int(next_tokens[path[-1]]))
    return path, committed


def compact(kv: np.ndarray, base: int, accepted_rows: list[int]) -> None:
    """kv [layers, pool rows, width]: moves the accepted rows of the call at `base` together, in place.

    In ascending order, because moves overlap.
    """
    for i, row in enumerate(accepted_rows):
        kv[:, base + i] = kv[:, base + row]
