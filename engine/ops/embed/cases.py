"""Named calls of embed, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import BFLOAT16, FLOAT32, Exact, RowwiseCase, dtype_of, padded, place, store
from engine.operators import Call, Output
from reference import ops


@dataclass(frozen=True, kw_only=True)
class EmbedCase(RowwiseCase):
    ROW_ARGS = ("tokens",)
    rows: int
    hidden: int
    vocab: int = 400
    type: int = FLOAT32
    max_rows: int = 17

    def call(self) -> Call:
        rng = self.rng()
        tokens = rng.integers(0, self.vocab, self.rows, np.int32)
        tokens[0], tokens[-1] = 0, self.vocab - 1
        return Call(
            dict(max_rows=self.max_rows, vocab=self.vocab, hidden=self.hidden, type=self.type),
            dict(
                n_rows=self.rows,
                tokens=padded(tokens, self.max_rows),
                table=store(rng.standard_normal((self.vocab, self.hidden)), self.type),
                y=Output((self.max_rows, self.hidden), dtype_of(self.type)),
            ),
        )

    def expected(self, call, outputs):
        y = ops.embed(call.args["tokens"][: self.rows], call.args["table"])
        return {"y": Exact(*place(outputs["y"].shape, y.dtype, np.arange(y.size), y.reshape(-1)))}


CASES = [
    EmbedCase(
        name="rows",
        risk="first and last token, rows past n keep their bytes",
        rows=9,
        hidden=128,
        invariance=True,
    ),
    EmbedCase(name="full", risk="as many rows as the call was made for", rows=17, hidden=192),
    EmbedCase(name="odd_width", risk="a row that is no multiple of a vector", rows=5, hidden=37),
    EmbedCase(name="bf16_odd_width", risk="rows of 2-byte values at odd addresses", rows=9, hidden=37, type=BFLOAT16),
    EmbedCase(name="one_row", risk="autoregressive decoding", rows=1, hidden=64, max_rows=1),
    EmbedCase(name="wide", risk="K2's hidden size", rows=3, hidden=7168, vocab=50, type=BFLOAT16),
]
