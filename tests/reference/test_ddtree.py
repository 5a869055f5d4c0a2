"""The draft tree against brute force and its invariants."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reference.ddtree import Tree, accept, build_tree, compact, log_probs_top_k

# Few distinct values make ties, between siblings and between branches.
TIED_LOGITS = st.sampled_from([0.0, -0.0, 1.0, 1.5, 3.0, -math.inf])
LOGITS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    elements=st.one_of(TIED_LOGITS, st.floats(-20, 20, width=32), st.just(math.nan)),
)


def distributions(logits, budget):
    return log_probs_top_k(logits, min(budget, logits.shape[1]))


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """Tokens from the root's child to each node, in row order."""
    found = [()]
    for row in range(1, len(tree.tokens)):
        found.append((*found[tree.parents[row]], int(tree.tokens[row])))
    return found[1:]


def brute_force(top_tokens, top_log_probs, budget) -> list[tuple[int, ...]]:
    """All prefixes, best first: score down, then rank tuple up."""
    levels, k = top_log_probs.shape
    scored = []
    for depth in range(1, levels + 1):
        for ranks in itertools.product(range(k), repeat=depth):
            score = np.float32(0)
            for level, rank in enumerate(ranks):
                score = score + top_log_probs[level, rank]
            if score > -math.inf:
                scored.append((-score, ranks))
    return [tuple(int(top_tokens[level, rank]) for level, rank in enumerate(ranks))
            for _, ranks in sorted(scored)[:budget]]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(LOGITS, st.integers(0, 40))
@example(np.zeros((3, 3), np.float32), 20)  # every prefix of a depth ties
@example(np.full((2, 3), -math.inf, np.float32), 5)
def test_tree_is_the_brute_force_one(logits, budget):
    with np.errstate(all="ignore"):
        top = log_probs_top_k(logits, logits.shape[1])
    tree = build_tree(*top, budget)
    assert paths(tree) == brute_force(*top, budget)


@settings(deadline=None, max_examples=200)
@given(LOGITS, st.integers(0, 40))
def test_invariants(logits, budget):
    with np.errstate(all="ignore"):
        top = distributions(logits, budget)
        tree, larger = build_tree(*top, budget), build_tree(*distributions(logits, budget + 1), budget + 1)
    assert tree.tokens[0] == tree.parents[0] == -1 and tree.depths[0] == 0
    assert all(x.dtype == np.int32 and len(x) == len(tree.tokens) <= budget + 1 for x in tree)
    for row in range(1, len(tree.tokens)):
        parent = tree.parents[row]
        assert 0 <= parent < row and tree.depths[row] == tree.depths[parent] + 1 <= len(logits)
    found = paths(tree)
    assert len(set(found)) == len(found)
    assert all(path[:-1] in found[:row] or len(path) == 1 for row, path in enumerate(found))  # prefix-closed
    assert paths(larger)[: len(found)] == found  # B nests in B + 1


def test_budget_over_the_full_tree():
    tree = build_tree(*log_probs_top_k(np.zeros((3, 2), np.float32), 2), 1000)
    assert len(tree.tokens) == 1 + 2 + 4 + 8


def test_top_k_1_is_a_chain():
    logits = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    tree = build_tree(*log_probs_top_k(logits, 1), 20)
    assert tree.tokens[1:].tolist() == logits.argmax(axis=1).tolist()
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3, 4] and tree.depths.tolist() == [0, 1, 2, 3, 4, 5]


def test_ties_go_to_the_smaller_rank_tuple():
    """(1) 0.5, then (1,1), (1,2), (2) of 0.25 each, in this order: a prefix before its extension, (1,2) before (2)."""
    half, quarter = np.float32(math.log(0.5)), np.float32(2 * np.float32(math.log(0.5)))
    tree = build_tree(np.array([[7, 8], [5, 6]]), np.array([[half, quarter], [half, half]]), 4)
    assert paths(tree) == [(7,), (7, 5), (7, 6), (8,)]


def test_impossible_tokens_are_never_pushed():
    logits = np.array([[0, -math.inf, 0], [math.nan, 0, 0]], np.float32)
    tree = build_tree(*log_probs_top_k(logits, 3), 10)
    assert paths(tree) == [(0,), (2,)]


def test_a_certain_token_costs_nothing():
    logits = np.array([[-math.inf, 5, -math.inf]] * 3, np.float32)
    tokens, log_probs = log_probs_top_k(logits, 3)
    assert log_probs[:, 0].tolist() == [0, 0, 0]
    assert paths(build_tree(tokens, log_probs, 10)) == [(1,), (1, 1), (1, 1, 1)]


@given(LOGITS, st.integers(1, 5))
def test_log_probs_top_k(logits, k):
    k = min(k, logits.shape[1])
    tokens, log_probs = log_probs_top_k(logits, k)
    assert tokens.dtype == np.int32 and log_probs.dtype == np.float32
    for level, row in enumerate(logits):
        key = [-math.inf if math.isnan(x) else float(x) for x in row]
        order = sorted(range(len(row)), key=lambda t, key=key: (-key[t], t))
        assert tokens[level].tolist() == order[:k]
        if np.isnan(row).any() or max(row) == -math.inf:
            assert np.isnan(log_probs[level]).all()
        else:
            z = math.fsum(math.exp(x) for x in key)
            want = [key[t] - math.log(z) for t in order[:k]]
            np.testing.assert_allclose(log_probs[level], want, rtol=1e-6, atol=1e-6)


def test_log_probs_of_large_logits():
    _, log_probs = log_probs_top_k(np.array([[1e30, 1e30, 0]], np.float32), 3)
    np.testing.assert_allclose(log_probs[0, :2], math.log(0.5))


@st.composite
def trees(draw):
    """Any tree whose siblings have distinct tokens, and the target's choice after each row."""
    tokens, parents, taken = [draw(st.integers(0, 3))], [-1], set()
    for row in range(1, draw(st.integers(1, 12))):
        edge = (draw(st.integers(0, row - 1)), draw(st.integers(0, 3)))
        if edge in taken:
            break
        taken.add(edge)
        parents.append(edge[0])
        tokens.append(edge[1])
    n = len(tokens)
    return np.array(tokens), np.array(parents), draw(hnp.arrays(np.int32, n, elements=st.integers(0, 3)))


@given(trees())
def test_accept_is_the_longest_agreeing_path(case):
    tokens, parents, next_tokens = case

    def agrees(row):  # every node of the path is what the target chose after its parent
        return row == 0 or (tokens[row] == next_tokens[parents[row]] and agrees(parents[row]))

    def depth(row):
        return 0 if row == 0 else 1 + depth(parents[row])

    agreeing = sorted(filter(agrees, range(len(tokens))), key=depth)
    rows, committed = accept(tokens, parents, next_tokens)
    assert rows == agreeing and rows == sorted(rows)
    assert committed == [*tokens[rows[1:]], next_tokens[rows[-1]]]


def test_accept_knows_token_0_and_nan():
    assert accept(np.array([5, 0, 0]), np.array([-1, 0, 1]), np.array([0, 0, 0])) == ([0, 1, 2], [0, 0, 0])
    assert accept(np.array([-1, 4]), np.array([-1, 0]), np.array([-1, 4])) == ([0], [-1])


@given(st.integers(0, 5), st.sets(st.integers(1, 9)))
def test_compact(base, below_root):
    rows = [0, *sorted(below_root)]
    kv = np.arange(2 * 20 * 3).reshape(2, 20, 3)
    before = kv.copy()
    compact(kv, base, rows)
    assert np.array_equal(kv[:, :base], before[:, :base])
    assert np.array_equal(kv[:, base : base + len(rows)], before[:, [base + row for row in rows]])
    assert np.array_equal(kv[:, base + len(rows) :], before[:, base + len(rows) :])


@pytest.mark.parametrize(("levels", "budget"), [(3, 0), (0, 2)])
def test_no_budget_or_no_level_is_the_root_alone(levels, budget):
    tree = build_tree(*log_probs_top_k(np.zeros((levels, 4), np.float32), budget), budget)
    assert [x.tolist() for x in tree] == [[-1], [-1], [0]]
