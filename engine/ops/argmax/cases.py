"""Named calls of argmax, each for the mistake it would show."""

from dataclasses import dataclass

import numpy as np

from engine.measure import Exact, RowwiseCase, padded, place
from engine.operators import Call, Output
from reference import ops

NAN, INF = np.nan, np.inf


@dataclass(frozen=True, kw_only=True)
class ArgmaxCase(RowwiseCase):
    """Random rows of a few distinct values, so that maxima tie; then `special` rows, repeated to fill the width."""

    ROW_ARGS = ("x",)
    cols: int
    rows: int = 9
    max_rows: int = 17
    special: tuple = ()
    levels: int = 5

    def call(self) -> Call:
        x = self.rng().integers(-self.levels, self.levels, (self.rows, self.cols)).astype(np.float32)
        for row, values in zip(x, self.special, strict=False):
            row[:] = np.resize(np.array(values, np.float32), self.cols)
        return Call(
            dict(max_rows=self.max_rows, cols=self.cols),
            dict(n_rows=self.rows, x=padded(x, self.max_rows), indices=Output((self.max_rows,), np.int32)),
        )

    def expected(self, call, outputs):
        best = ops.argmax(call.args["x"][: self.rows])
        return {"indices": Exact(*place((self.max_rows,), np.int32, np.arange(self.rows), best))}


CASES = [
    ArgmaxCase(name="ties", risk="the lowest index of equal maxima", cols=400, invariance=True),
    ArgmaxCase(name="distinct", risk="the right index anywhere in the row", cols=400, levels=10**6, invariance=True),
    ArgmaxCase(name="odd_width", risk="a maximum in the tail of a vector", cols=37, levels=1000, rows=17),
    ArgmaxCase(name="one_column", risk="shorter than any vector", cols=1),
    ArgmaxCase(
        name="not_numbers",
        risk="NaN never wins, an all-NaN row gives -1, all -inf gives 0, -0 equals 0",
        cols=97,
        special=(
            (NAN,),
            (-INF,),
            (NAN, -INF),
            (NAN, 1, 2),
            (3, NAN),
            (INF, NAN, INF),
            (-0.0, 0.0),
            (NAN, NAN, -1),
        ),
    ),
    ArgmaxCase(name="vocabulary", risk="K2's vocabulary, split over many threads", cols=163840, rows=3, max_rows=3),
    ArgmaxCase(name="one_row", risk="autoregressive decoding", cols=512, rows=1, max_rows=1),
]
