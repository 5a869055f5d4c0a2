"""Errors and budgets: what must never pass."""

import math

import numpy as np
import pytest

from engine.measure import BFLOAT16, Exact, Measurement, Near, RoundedOnce, bf16, float32_budget, load, store
from engine.operators import poisoned

NAN, INF = np.nan, np.inf


def f32(*values):
    return np.array(values, np.float32)


def test_near_is_the_largest_difference():
    assert Near(np.array([1.0, 2.0]), 0.1).error(f32(1.25, 1.5)) == 0.5


@pytest.mark.parametrize(("have", "want"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (INF, -INF), (NAN, INF)])
def test_what_is_no_number_is_no_small_error(have, want):
    error = Near(np.array([0.0, want]), 1e9).error(f32(0, have))
    assert not Measurement("x", error, 1e9).within


def test_nan_and_infinities_where_the_twin_has_them():
    assert Near(np.array([NAN, INF, -INF]), 0.0).error(f32(NAN, INF, -INF)) == 0


def test_a_large_error_is_not_hidden_by_nan():
    error = Near(np.array([1.0, 1.0]), 1e-3).error(f32(NAN, 1.0))
    assert math.isnan(error) and not Measurement("x", error, 1e-3).within


@pytest.mark.parametrize("kind", [Exact, lambda values, written: Near(values.astype(np.float64), 0.1, written)])
def test_writing_past_the_rows_is_infinite(kind):
    written = np.array([True, False])
    actual = poisoned(2, np.float32)
    actual[0] = 1
    assert kind(f32(1, 0), written).error(actual) == 0
    actual[1] = 1
    assert kind(f32(1, 1), written).error(actual) == INF


def test_exact_counts_entries_and_sees_the_sign_of_zero():
    assert Exact(f32(0.0, 1, 2)).error(f32(-0.0, 1, 3)) == 2


def test_exact_wants_the_same_type():
    with pytest.raises(ValueError, match="expected int32"):
        Exact(np.array([1], np.int32)).error(f32(1))


def test_bf16_rounds_to_nearest_even():
    values = f32(1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, -1 - 2**-8 - 2**-16, 3.4e38, 1e-40)
    assert bf16(values).tolist()[:5] == [1, 1, 1 + 2**-6, 1 + 2**-7, -1 - 2**-7]
    assert np.isinf(bf16(values)[5])
    assert load(store(f32(NAN), BFLOAT16)) != 1 and np.isnan(load(store(f32(NAN), BFLOAT16)))[0]


def test_rounded_once():
    exact = np.random.default_rng(1).standard_normal(1000)
    noisy = exact * (1 + 1e-7)
    twice = bf16(bf16(noisy / 2) + bf16(noisy / 2 + 2**-10)) - np.float32(2**-10)
    assert RoundedOnce(exact, 1e-6).error(store(noisy, BFLOAT16)) == 0
    assert RoundedOnce(exact, 1e-6).error(store(twice, BFLOAT16)) > 100
    assert RoundedOnce(exact, 1e-6).error(store(np.full(1000, np.nan), BFLOAT16)) == 1000


def test_float32_budget_is_measured_with_a_floor():
    exact = np.array([1.0, 100.0])
    assert float32_budget(exact, exact + 1e-2) == pytest.approx(2e-2)
    assert float32_budget(exact, exact) == pytest.approx(1e-3)
