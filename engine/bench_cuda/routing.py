"""Which experts the rows of a call take."""

import numpy as np


def uniform(rows: int, n_experts: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [rows, top_k], the experts of a row all different."""
    return np.stack([rng.permutation(n_experts)[:top_k] for _ in range(rows)]).astype(np.int32)


def correlated(rows: int, n_experts: int, top_k: int, rng: np.random.Generator, keep: float = 0.8) -> np.ndarray:
    """The same for rows of a tree, which resemble each other: a slot keeps the expert of an earlier row, the row's
    parent, with probability `keep`, unless the row has that expert already."""
    ids = uniform(rows, n_experts, top_k, rng)
    for row in range(1, rows):
        parent = ids[rng.integers(row)]
        for slot in range(top_k):
            if rng.random() < keep and parent[slot] not in ids[row]:
                ids[row, slot] = parent[slot]
    return ids


def experts_hit(ids: np.ndarray) -> int:
    return len(np.unique(ids))


def int4_bytes(weights: int, group: int) -> int:
    """Of INT4 weights with a bf16 scale a group."""
    return weights // 2 + 2 * weights // group
