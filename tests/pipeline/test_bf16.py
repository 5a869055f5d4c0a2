"""bf16 runs are judged against plain torch bf16, by the median position."""

import numpy as np
import pytest

from engine.evidence import Bf16Golden, Decoded, Golden
from engine.judge import Findings, judge_ar_bf16

PLAN = {"verify": {"bf16_factor": 2.0}}


def judge(error):
    """Two prompts of eight tokens; torch is 0.01 off everywhere but at one flipped position."""
    findings, goldens, bf16, decoded = Findings(), {}, {}, {}
    for name in ("a", "b"):
        tokens, logits = np.arange(8, dtype=np.int32), np.zeros((8, 5), np.float32)
        torch_errors = np.full(8, 0.01)
        torch_errors[3] = 2.0
        ours = logits + error(name).astype(np.float32)[:, None]
        goldens[name] = Golden(np.array([1], np.int32), tokens, logits, 1e-6)
        bf16[name] = Bf16Golden(logits, torch_errors)
        nothing = np.empty(0, np.int32)
        decoded[name] = Decoded(tokens, logits, np.zeros((1, 8, 2)), nothing, nothing, ours, {})
    return findings, judge_ar_bf16("cpu_bf16", goldens, bf16, decoded, PLAN, findings)


def test_as_near_as_torch_passes():
    findings, records = judge(lambda name: np.full(8, 0.019))
    assert findings.none
    assert records["a"] == {
        "tokens": 8,
        "exact": 8,
        "max_abs_logit_diff": pytest.approx(0.019),
        "median_logit_diff": pytest.approx(0.019),
        "bound": 0.02,
        "noise": 0.01,
    }


def test_other_positions_may_flip():
    findings, _ = judge(lambda name: np.where(np.arange(8) < 3, 1.5, 0.01))
    assert findings.none


@pytest.mark.parametrize("size", [0.021, np.nan])
def test_further_than_twice_torch_fails_and_says_where(size):
    findings, _ = judge(lambda name: np.full(8, size if name == "b" else 0.0201))
    assert "cpu_bf16 ar, all prompts: median_logit_diff=" in findings.faults[0]
    assert "against bf16 golden: prompt b, step 0, row 0, layer head, tensor logits[" in str(findings.divergence)
