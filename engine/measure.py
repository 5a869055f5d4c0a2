"""How far an operator is from its numpy twin, and how far it may be.

A case (engine/ops/<op>/cases.py) makes the inputs of one call and says what must come out: `Exact` bytes, or floats
`Near` float64 within a budget. Budgets are measured on the same inputs, not guessed:

- float32: 2 x the distance of numpy float32 from numpy float64, and at least 1e-5 of the largest output (a kernel may
  add in another order than numpy, whose own order is a good one).
- bfloat16: 2 x the error of plain low-precision code, which rounds to bf16 after every step, as eager torch does.
"""

import zlib
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from engine import contract
from engine.operators import Call, Operator, OperatorError, Output, View, poisoned

FLOAT32 = contract.element_types()["kFloat32"]
BFLOAT16 = contract.element_types()["kBFloat16"]
EPS = float(np.finfo(np.float32).eps)


# ---- element types ---------------------------------------------------------------------------------------------------
def dtype_of(element: int) -> type:
    """numpy's type for an element type of the contract; bf16 values travel as uint16."""
    return np.uint16 if element == BFLOAT16 else np.float32


def store(values, element: int) -> np.ndarray:
    """Values as the operator takes them: float32, or bf16 (round to nearest, ties to even) as uint16."""
    values = np.ascontiguousarray(values, np.float32)
    if element == FLOAT32:
        return values
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def load(stored: np.ndarray) -> np.ndarray:
    """The float32 values of a float32 array, or of bf16 in uint16."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(stored, np.float32)


def bf16(values) -> np.ndarray:
    """float32 values rounded to bf16: one step of plain low-precision code."""
    return load(store(values, BFLOAT16))


# ---- what must come out ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Exact:
    """The same bytes where `written`; elsewhere what was `before` the call (None: poison). The error counts entries."""

    values: np.ndarray
    written: np.ndarray | bool = True
    before: np.ndarray | None = None
    budget: ClassVar[float] = 0.0

    def error(self, actual: np.ndarray) -> float:
        if _touched(self, actual):
            return float("inf")
        written = np.broadcast_to(self.written, actual.shape)
        if actual.dtype != self.values.dtype or actual.shape != self.values.shape:
            raise ValueError(f"{actual.dtype}{actual.shape}, expected {self.values.dtype}{self.values.shape}")
        return float((_bytes(actual) != _bytes(self.values)).any(axis=-1)[written].sum())


@dataclass(frozen=True)
class Near:
    """Floats (float32, bf16 in uint16) within `budget` of `values`; NaN and infinities must stand where `values` has
    them. Elsewhere as Exact."""

    values: np.ndarray
    budget: float
    written: np.ndarray | bool = True
    before: np.ndarray | None = None

    def error(self, actual: np.ndarray) -> float:
        if _touched(self, actual):
            return float("inf")
        written = np.broadcast_to(self.written, actual.shape)
        have, want = load(actual)[written].astype(np.float64), self.values[written]
        same = (have == want) | (np.isnan(have) & np.isnan(want))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0, np.abs(have - want))
        return float(np.max(difference, initial=0))  # NaN if any difference is


@dataclass(frozen=True)
class RoundedOnce:
    """bf16 values between the roundings of `values` - tolerance and `values` + tolerance, as fp32 arithmetic of that
    error and one rounding give them. A second rounding on the way moves some entries; they are counted."""

    values: np.ndarray
    tolerance: float
    written: np.ndarray | bool = True
    budget: ClassVar[float] = 0.0

    def error(self, actual: np.ndarray) -> float:
        have = load(actual)
        low, high = bf16(self.values - self.tolerance), bf16(self.values + self.tolerance)
        return float((~((low <= have) & (have <= high)) & self.written).sum())


def rounded_once(near: Near, k: int = 16) -> dict[str, Near | RoundedOnce]:
    """What is expected of output y in bf16, the rounding of a sum of k products among it."""
    exact = near.values[np.broadcast_to(near.written, near.values.shape)]
    return {"y": near, "y.rounding": RoundedOnce(near.values, accumulation_budget(exact, k), near.written)}


def _bytes(array: np.ndarray) -> np.ndarray:
    """[…, itemsize] bytes of every entry."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(*array.shape, array.itemsize)


def _touched(expected, actual) -> bool:
    before = poisoned(actual.shape, actual.dtype) if expected.before is None else expected.before
    changed = (_bytes(actual) != _bytes(before)).any(axis=-1)
    return bool((changed & ~np.broadcast_to(expected.written, actual.shape)).any())


# ---- budgets ---------------------------------------------------------------------------------------------------------
def _largest(values) -> float:
    values = np.abs(values[np.isfinite(values)])
    return float(values.max(initial=0))


def float32_budget(exact: np.ndarray, single: np.ndarray) -> float:
    """exact: the twin in float64, single: the twin in float32, on the same inputs."""
    with np.errstate(invalid="ignore"):
        noise = _largest(np.asarray(single, np.float64) - exact)
    return max(1e-5 * _largest(exact), 2 * noise)


def bfloat16_budget(exact: np.ndarray, plain: np.ndarray) -> float:
    """plain: the operator as eager torch would compute it in bf16, rounding after every step."""
    with np.errstate(invalid="ignore"):
        return 2 * _largest(np.asarray(plain, np.float64) - exact)


def accumulation_budget(exact: np.ndarray, k: int) -> float:
    """bf16 inputs, fp32 output: tensor cores truncate when they add a step of 16 products, up to one ulp a step."""
    return max(1e-5, EPS * k / 16) * _largest(exact)


# ---- layouts ---------------------------------------------------------------------------------------------------------
def place(shape, dtype, index, values) -> tuple[np.ndarray, np.ndarray]:
    """(buffer of `shape` with `values` at the flat positions `index`, mask of these positions)."""
    buffer, written = np.zeros(shape, dtype), np.zeros(shape, bool)
    buffer.reshape(-1)[index] = values
    written.reshape(-1)[index] = True
    return buffer, written


def padded(array: np.ndarray, rows: int) -> np.ndarray:
    """`array` with poison below, `rows` in all: rows that no kernel may use."""
    buffer = poisoned((rows, *array.shape[1:]), array.dtype)
    buffer[: len(array)] = array
    return buffer


# ---- cases -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Case:
    """One named call of an operator. `risk` says which mistake it would show."""

    name: str
    risk: str
    invariance: bool = False  # also checked for row invariance, by `arrangements`

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(self.name.encode()))

    def call(self) -> Call:
        """The inputs, the same in every process."""
        raise NotImplementedError

    def expected(self, call: Call, outputs: dict[str, np.ndarray]) -> dict[str, Exact | Near | RoundedOnce]:
        """What must come out, by output ("y"), or by output and demand ("y.rounding") where there are several.

        May look at `outputs` where one output is judged by another.
        """
        raise NotImplementedError

    def arrangements(self, call: Call):
        """Calls whose rows must come out with the same bytes: yields (a call, its rows, the same rows of `call`)."""
        raise NotImplementedError

    def output_rows(self, call: Call, outputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs, with axis 0 = row of the call, that `arrangements` compares."""
        return list(outputs.values())


@dataclass(frozen=True, kw_only=True)
class RowwiseCase(Case):
    """A case whose rows do not depend on each other, so that they may be called in any company and order."""

    ROW_ARGS: ClassVar[tuple[str, ...]]  # arguments with one entry a row along axis 0

    def arrangements(self, call: Call):
        n = call.args["n_rows"]
        yield call, range(n), range(n)
        middle = n // 2
        selections = [
            [0],
            [middle],
            [n - 1],
            [0, 1],
            [n - 1, middle],
            list(range(2, 9)),
            list(range(n))[::-1],
        ]
        for rows in [*selections, [middle] * n]:
            yield self.with_rows(call, rows, len(rows)), range(len(rows)), rows
        for rows in ([0], [n - 1]):  # one row in a call made for many
            yield self.with_rows(call, rows, n), [0], rows

    def with_rows(self, call: Call, rows, max_rows: int) -> Call:
        """The call with just these rows, in this order."""
        args = dict(call.args, n_rows=len(rows))
        for name, value in args.items():
            base = value.base if isinstance(value, View) else value
            if name in self.ROW_ARGS and isinstance(base, np.ndarray):
                base = padded(base[list(rows)], max_rows)
            elif isinstance(base, Output):
                base = Output((max_rows + len_before(call, name), *base.shape[1:]), base.dtype)
            args[name] = View(base, value.offset) if isinstance(value, View) else base
        return replace(call, shape=dict(call.shape, max_rows=max_rows), args=args)

    def output_rows(self, call: Call, outputs):
        return [value[len_before(call, name) :] for name, value in outputs.items()]


def len_before(call: Call, name: str) -> int:
    """Rows of output `name` before the first that the call writes."""
    return call.args.get(f"{name}_first_row") or 0


@dataclass(frozen=True)
class Refusal:
    """A shape that every backend must refuse, with a reason that starts with the field's name."""

    name: str
    shape: dict
    field: str


@dataclass(frozen=True)
class Measurement:
    name: str
    max_abs_error: float
    budget: float
    message: str = ""

    @property
    def within(self) -> bool:
        return self.max_abs_error <= self.budget  # False for NaN


def measure_case(operator: Operator, case: Case) -> list[Measurement]:
    """One measurement an output and demand, named `case[.output][.demand]`: a single output is not named."""
    call = case.call()
    try:
        outputs = operator.run(call)
    except OperatorError as error:
        return [Measurement(case.name, float("inf"), 0.0, str(error))]
    expected = case.expected(call, outputs)
    single = len({key.partition(".")[0] for key in expected}) == 1
    measurements = []
    for key, want in expected.items():
        output, dot, demand = key.partition(".")
        name = f"{case.name}{dot}{demand}" if single else f"{case.name}.{key}"
        measurements.append(Measurement(name, want.error(outputs[output]), float(want.budget)))
    return measurements


def measure_invariance(operator: Operator, case: Case) -> Measurement:
    """Bytes that differ when the same rows are called in other company and order, with 1 and 2 threads."""
    call = case.call()
    arrangements = list(case.arrangements(call))
    name = f"row_invariance.{case.name}"
    differing = 0
    try:
        with operator.library.threads(1):
            reference = case.output_rows(call, operator.run(call))
        for threads in (1, 2):
            with operator.library.threads(threads):
                for other, its_rows, rows in arrangements:
                    results = case.output_rows(other, operator.run(other))
                    for want, have in zip(reference, results, strict=True):
                        differing += int((_bytes(have[list(its_rows)]) != _bytes(want[list(rows)])).sum())
    except OperatorError as error:
        return Measurement(name, float("inf"), 0.0, str(error))
    return Measurement(name, float(differing), 0.0)


def measure_no_rows(operator: Operator, case: Case) -> Measurement:
    """Bytes written by the call with n_rows = 0."""
    call = case.call()
    call = replace(call, args=call.args | {"n_rows": 0})
    name, differing = f"no_rows.{case.name}", 0
    try:
        outputs = operator.run(call)
    except OperatorError as error:
        return Measurement(name, float("inf"), 0.0, str(error))
    for output, now in outputs.items():
        value = call.args[output]
        value = value.base if isinstance(value, View) else value
        before = poisoned(value.shape, value.dtype) if isinstance(value, Output) else value
        differing += int((_bytes(now) != _bytes(before)).sum())
    return Measurement(name, float(differing), 0.0)


def measure_refusal(operator: Operator, refusal: Refusal) -> Measurement:
    """Error 0 if the shape is refused by the name of the field, else 1."""
    reason = operator.refuse(refusal.shape)
    named = reason is not None and reason.startswith(refusal.field)
    return Measurement(f"refuses.{refusal.name}", float(not named), 0.0, "" if named else f"reason: {reason}")
