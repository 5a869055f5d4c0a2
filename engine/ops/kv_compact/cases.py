"""Named calls of kv_compact, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import BFLOAT16, FLOAT32, Case, Exact, dtype_of, padded, store
from engine.operators import Call, decode_state
from reference import ddtree


@dataclass(frozen=True, kw_only=True)
class KvCompactCase(Case):
    accepted: tuple[int, ...]
    base: int = 13
    layers: int = 3
    width: int = 48
    pool_rows: int = 30
    max_depth: int = 7
    type: int = FLOAT32
    sparse: bool = False  # zeros before the call's rows, so that a pool of gigabytes is quick to make

    def call(self) -> Call:
        begin = self.base if self.sparse else 0
        kv = np.zeros((self.layers, self.pool_rows, self.width), dtype_of(self.type))
        kv[:, begin:] = store(self.rng().standard_normal(kv[:, begin:].shape), self.type)
        state = decode_state(prefix=self.base + len(self.accepted), accepted=len(self.accepted), n_rows=1)
        return Call(
            dict(
                layers=self.layers,
                width=self.width,
                pool_rows=self.pool_rows,
                max_depth=self.max_depth,
                type=self.type,
            ),
            dict(
                state=state,
                accepted_rows=padded(np.array(self.accepted, np.int32), self.max_depth + 1),
                kv=kv,
            ),
        )

    def expected(self, call, outputs):
        kv = call.args["kv"].copy()
        ddtree.compact(kv, self.base, self.accepted)
        return {"kv": Exact(kv, before=call.args["kv"])}


CASES = [
    KvCompactCase(name="gaps", risk="every layer; rows past the path keep their bytes", accepted=(0, 2, 5, 9)),
    KvCompactCase(
        name="overlap",
        risk="a row that is source and target: ascending order",
        accepted=(0, 2, 3, 4, 5, 6, 7, 8),
    ),
    KvCompactCase(
        name="overlap_wide", risk="moves that overlap across blocks", accepted=(0, 3, 4, 6, 7, 10), width=576
    ),
    KvCompactCase(name="in_place", risk="the first child each time: nothing moves", accepted=(0, 1, 2, 3)),
    KvCompactCase(name="root_alone", risk="nothing accepted but the root", accepted=(0,)),
    KvCompactCase(name="nothing", risk="a round after the end: accepted 0", accepted=()),
    KvCompactCase(name="prefix_0", risk="the first row of the pool", accepted=(0, 4, 6), base=0),
    KvCompactCase(
        name="pool_end", risk="the last row of the pool; the next layer follows", accepted=(0, 5, 16), base=13
    ),
    KvCompactCase(name="odd_width", risk="a row that is no multiple of a vector", accepted=(0, 2, 4), width=37),
    KvCompactCase(name="bf16", risk="2-byte values", accepted=(0, 2, 3, 8), type=BFLOAT16),
    KvCompactCase(name="bf16_odd_width", risk="rows at odd addresses", accepted=(0, 3, 5), width=37, type=BFLOAT16),
    KvCompactCase(name="k2", risk="61 layers of 576", accepted=(0, 2, 7), layers=61, width=576, type=BFLOAT16),
]

LARGE = [
    KvCompactCase(
        name="k2_64k",
        risk="more than 2^31 elements in the pool: 32-bit offsets of high layers",
        accepted=(0, 3, 5, 9),
        base=65536,
        layers=61,
        width=576,
        pool_rows=65553,
        type=BFLOAT16,
        sparse=True,
    )
]
