"""Killed at random moments: a few here, on the first rungs; `snakemake results/kills.json` kills the whole ladder 30
times."""

import pytest

from tests.bad_input.kills import compare, kill_again_and_again


def test_killed_and_called_again(tmp_path):
    record = kill_again_and_again(tmp_path, ["results/golden/small_int4.safetensors"], kills=3, seed=2)
    assert len(record) == 3
    assert min(kill["after"] for kill in record) < max(kill["after"] for kill in record)


@pytest.mark.parametrize("have", [{}, {"a": "2"}, {"a": "1", "b": "1"}], ids=["missing", "different", "too many"])
def test_difference_is_told(have):
    with pytest.raises(RuntimeError, match="after 3 kills"):
        compare(have, {"a": "1"}, "after 3 kills")
