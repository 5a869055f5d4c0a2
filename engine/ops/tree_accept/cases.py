"""Named calls of tree_accept, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine import contract
from engine.measure import Case, Exact, padded
from engine.operators import Call, Output, decode_state, poisoned
from reference import ddtree, ops

STOP_TOKEN, TOKEN_LIMIT, NAN_LOGITS = (
    contract.decode_state().constants[name] for name in ("kStopToken", "kTokenLimit", "kNanLogits")
)


@dataclass(frozen=True, kw_only=True)
class TreeAcceptCase(Case):
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    next_tokens: tuple[int, ...]
    max_rows: int = 17
    max_depth: int = 7
    prefix: int = 21
    generated: int = 3
    limit: int = 24
    stop_ids: tuple[int, ...] = ()
    done: int = 0

    def call(self) -> Call:
        n = 0 if self.done else len(self.tokens)
        output = poisoned(self.limit, np.int32)
        output[: self.generated] = 400 + np.arange(self.generated)
        state = decode_state(
            n_rows=n,
            prefix=self.prefix,
            done=self.done,
            generated=self.generated,
            limit=self.limit,
            n_stop_ids=len(self.stop_ids),
            committed=self.generated,
            steps=2,
            accepted=9,
            verified=9,
        )
        return Call(
            dict(max_rows=self.max_rows, max_depth=self.max_depth),
            dict(
                state=state,
                tokens=padded(np.array(self.tokens, np.int32), self.max_rows),
                parents=padded(np.array(self.parents, np.int32), self.max_rows),
                next_tokens=padded(np.array(self.next_tokens, np.int32), self.max_rows),
                stop_ids=np.array([*self.stop_ids, -1], np.int32),
                accepted_rows=Output((self.max_depth + 1,), np.int32),
                output=output,
            ),
        )

    def expected(self, call, outputs):
        state, tokens, output = (call.args[name].copy() for name in ("state", "tokens", "output"))
        path, committed = [], []
        if not self.done:
            path, committed = ddtree.accept(*(np.array(x) for x in (self.tokens, self.parents, self.next_tokens)))
            if -1 in committed:
                path, committed = [], []
                state["done"] = NAN_LOGITS
            else:
                state["prefix"] += len(path)
                state["committed"] += len(committed)
                state["steps"] += 1
                tokens[0] = committed[-1]
                for token in committed:
                    if not state["done"]:
                        output[state["generated"][0]] = token
                        state["generated"] += 1
                        stop, limit = token in self.stop_ids, state["generated"][0] == self.limit
                        state["done"] = STOP_TOKEN if stop else TOKEN_LIMIT if limit else 0
            state["n_rows"] = 0 if state["done"] else 1
        state["accepted"], state["verified"] = len(path), call.args["state"]["n_rows"]
        rows = outputs["accepted_rows"].copy()  # entries past the path are free
        rows[: len(path)] = path
        return {
            "state": Exact(state, before=call.args["state"]),
            "tokens": Exact(tokens),
            "accepted_rows": Exact(rows),
            "output": Exact(output),
        }


def random_case(seed: int) -> TreeAcceptCase:
    """A random tree of few tokens whose target mostly follows it, so that walks are long and siblings near-misses."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 18))
    parents, tokens = [-1], [0]
    while len(parents) < n:
        parent, token = int(rng.integers(0, len(parents))), int(rng.integers(0, 6))
        if (parent, token) not in list(zip(parents, tokens, strict=True))[1:]:
            parents.append(parent)
            tokens.append(token)
    children = [[c for c in range(1, n) if parents[c] == row] for row in range(n)]
    follow = [tokens[rng.choice(c)] if c and rng.random() < 0.9 else int(rng.integers(0, 6)) for c in children]
    depth = int(ops.depths(np.array(parents)).max())
    return TreeAcceptCase(
        name=f"random_{seed}",
        risk="any tree and target against the walk by parents",
        tokens=tuple(tokens),
        parents=tuple(parents),
        next_tokens=tuple(follow),
        max_depth=depth,
        stop_ids=(5,) if seed % 4 == 3 else (),
        limit=int(rng.integers(4, 12)),
    )


_CHAIN = dict(tokens=(7, 1, 2, 3, 4), parents=(-1, 0, 1, 2, 3), next_tokens=(1, 2, 3, 4, 5))
_TREE = dict(tokens=(7, 1, 2, 3, 1, 2, 9), parents=(-1, 0, 0, 1, 2, 4, 4))

CASES = [
    TreeAcceptCase(name="root_alone", risk="autoregressive decoding", tokens=(7,), parents=(-1,), next_tokens=(8,)),
    TreeAcceptCase(name="whole_chain", risk="bonus after the last node", **_CHAIN),
    TreeAcceptCase(
        name="nothing_accepted",
        risk="the root is always accepted",
        **{**_CHAIN, "next_tokens": (9, 2, 3, 4, 5)},
    ),
    TreeAcceptCase(
        name="through_second_child",
        risk="a path that leaves the first child: rows 0, 2, 4, 6",
        next_tokens=(2, 0, 1, 0, 9, 0, 30),
        **_TREE,
    ),
    TreeAcceptCase(
        name="cousin_token",
        risk="a token that a child of another row holds",
        next_tokens=(1, 9, 0, 0, 0, 0, 0),
        **_TREE,
    ),
    TreeAcceptCase(
        name="root_token",
        risk="the root's own token is no child of it",
        **{**_CHAIN, "next_tokens": (7, 2, 3, 4, 5)},
    ),
    TreeAcceptCase(
        name="token_0",
        risk="token id 0 taken for padding",
        tokens=(0, 0, 0),
        parents=(-1, 0, 1),
        next_tokens=(0, 0, 0),
    ),
    TreeAcceptCase(
        name="stop_inside", risk="a stop token inside the path: kept, the rest cut", stop_ids=(9, 2), **_CHAIN
    ),
    TreeAcceptCase(name="stop_first", risk="a stop token as the first of the round", stop_ids=(1,), **_CHAIN),
    TreeAcceptCase(name="stop_bonus", risk="a stop token as the bonus", stop_ids=(5,), **_CHAIN),
    TreeAcceptCase(name="no_stop_ids", risk="stop_ids past n_stop_ids", **{**_CHAIN, "next_tokens": (1, 2, 3, 4, 0)}),
    TreeAcceptCase(name="limit_inside", risk="the limit inside the path", limit=5, **_CHAIN),
    TreeAcceptCase(name="limit_bonus", risk="the bonus is the last token", limit=8, **_CHAIN),
    TreeAcceptCase(name="limit_next", risk="the limit one past the bonus: not done", limit=9, **_CHAIN),
    TreeAcceptCase(name="limit_1", risk="one token left", limit=4, **_CHAIN),
    TreeAcceptCase(
        name="stop_at_limit",
        risk="both at once: the stop token is the reason",
        limit=5,
        stop_ids=(2,),
        **_CHAIN,
    ),
    TreeAcceptCase(
        name="stop_behind_limit",
        risk="a stop token that the limit cuts off is no reason",
        limit=5,
        stop_ids=(4,),
        **_CHAIN,
    ),
    TreeAcceptCase(name="first_round", risk="nothing generated, prefix 0", generated=0, prefix=0, **_CHAIN),
    TreeAcceptCase(
        name="nan_on_path", risk="a row of NaN commits nothing", **{**_CHAIN, "next_tokens": (1, 2, -1, 4, 5)}
    ),
    TreeAcceptCase(
        name="nan_off_path",
        risk="a NaN row that the walk never reaches",
        **{**_CHAIN, "next_tokens": (1, 9, -1, -1, -1)},
    ),
    TreeAcceptCase(name="done", risk="a round after the end changes nothing", done=1, **_CHAIN),
    *map(random_case, range(24)),
]
