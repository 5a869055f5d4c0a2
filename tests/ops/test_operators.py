"""Calling one operator from Python: what is refused, poisoned and guarded."""

from dataclasses import replace

import numpy as np
import pytest

from engine.measure import FLOAT32
from engine.operators import GUARD_BYTES, Alias, Call, OperatorError, Output, Refused, View
from engine.ops.gemm.cases import GemmCase
from engine.ops.swiglu.cases import SwigluCase

CALL = SwigluCase(name="small", risk="", rows=3, cols=5, max_rows=4).call()


def with_args(call: Call, **args) -> Call:
    return replace(call, args=dict(call.args, **args))


def test_outputs_start_as_poison(library):
    y = library.operator("swiglu").run(CALL)["y"]
    assert np.isfinite(y[:3]).all() and np.isnan(y[3]).all()


def test_inputs_are_not_returned(library):
    assert list(library.operator("swiglu").run(CALL)) == ["y"]


def test_a_view_starts_inside_its_base(library):
    x = np.concatenate((np.full(3, np.nan, np.float32), CALL.args["gate_up"].reshape(-1)))
    run = library.operator("swiglu").run
    there = run(with_args(CALL, gate_up=View(x, 3), y=View(Output((25,)), 5)))["y"]
    assert there[5:].tobytes() == run(CALL)["y"].tobytes() and np.isnan(there[:5]).all()


def test_an_alias_is_the_same_memory(library):
    case = GemmCase(name="small", risk="", rows=3, n=4, k=5, max_rows=4, add="given")
    call = case.call()
    in_place = with_args(call, add=Alias("y"), y=call.args["add"])
    run = library.operator("gemm").run
    assert run(in_place)["y"].tobytes() == run(call)["y"].tobytes()


def test_writing_past_the_end_is_an_error(library):
    with pytest.raises(OperatorError, match="swiglu: y: written past the end of its 40 bytes"):
        library.operator("swiglu").run(with_args(CALL, y=Output((2, 5))))


def test_writing_before_the_start_is_an_error(library):
    with pytest.raises(OperatorError, match="swiglu: y: written before the start"):
        library.operator("swiglu").run(with_args(CALL, y=View(Output((4, 5)), -GUARD_BYTES // 8)))


def test_writing_an_input_is_an_error(library, monkeypatch):
    def vandal(handle, shape, args, workspace):
        return library.upload(args._obj.gate_up, b"x", 1)

    monkeypatch.setattr(library, "run", vandal)
    with pytest.raises(OperatorError, match="swiglu: gate_up: an input was written"):
        library.operator("swiglu").run(CALL)


def test_refused_by_name(library):
    call = replace(
        CALL,
        shape=dict(
            max_rows=1,
            heads=1,
            dim=15,
            x_row_stride=15,
            x_head_stride=15,
            y_row_stride=15,
            y_head_stride=15,
            type=FLOAT32,
        ),
    )
    with pytest.raises(Refused, match="rope: dim: "):
        library.operator("rope").run(call)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"z": None}, "SwigluArgs: z: no such field"),
        ({"gate_up": np.zeros((4, 2, 5))}, "gate_up: float64: the contract says void"),
        ({"n_rows": np.zeros(1, np.float32)}, "n_rows: float32: the contract says int32_t"),
        ({"gate_up": Output((4, 2, 5))}, "swiglu: gate_up: an Output, but the operator only reads it"),
    ],
)
def test_arguments_that_do_not_fit_the_contract(library, args, message):
    with pytest.raises((ValueError, KeyError), match=message):
        library.operator("swiglu").run(with_args(CALL, **args))


def test_arguments_that_are_missing(library):
    with pytest.raises(ValueError, match="SwigluArgs: y: not given"):
        library.operator("swiglu").run(replace(CALL, args={k: v for k, v in CALL.args.items() if k != "y"}))
    with pytest.raises(ValueError, match="SwigluShape: cols: not given"):
        library.operator("swiglu").run(replace(CALL, shape=dict(max_rows=4, type=FLOAT32)))


def test_an_operator_that_the_library_lacks(library, monkeypatch):
    monkeypatch.setattr(library, "find_operator", lambda name: None)
    with pytest.raises(OperatorError, match=r"swiglu: the .* library has no such operator"):
        library.operator("swiglu")
