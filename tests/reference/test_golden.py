import json
import sys

import numpy as np
import pytest

from reference import golden, stage
from reference.bundle import Bundle, read_safetensors
from reference.golden import bound, check, prompt_tokens
from reference.model import Model, chain
from reference.weights import generate_bundle

PROMPTS = [{"name": "short", "tokens": [5]}, {"name": "longer", "tokens": [1, 2, 3, 0]}]


def test_prompt_tokens():
    assert prompt_tokens({"name": "x", "text": "Aé"}, 256) == [65, 0xC3, 0xA9]
    assert prompt_tokens({"name": "x", "tokens": [0, 9]}, 10) == [0, 9]


@pytest.mark.parametrize(
    ("prompt", "vocab", "error"),
    [
        ({"text": "A"}, 255, "prompts.x.text: 'A': bytes are tokens, which needs vocab_size >= 256, not 255"),
        ({"text": ""}, 256, "prompts.x.text: empty: needs a token"),
        ({"tokens": []}, 256, "prompts.x.tokens: empty: needs a token"),
        ({"tokens": [3, 10]}, 10, "prompts.x.tokens: 10: outside the vocabulary of 10"),
        ({"tokens": [-1]}, 10, "prompts.x.tokens: -1: outside the vocabulary of 10"),
    ],
)
def test_prompts_refused(prompt, vocab, error):
    with pytest.raises(ValueError) as caught:
        prompt_tokens({"name": "x", **prompt}, vocab)
    assert str(caught.value) == error


def test_bound():
    assert bound(1e-6) == 1e-5 and bound(7e-6) == pytest.approx(1.4e-5)


def test_check():
    logits = np.random.default_rng(0).standard_normal((2, 100))
    check("x", logits, np.array([1.0, 1.1e-4]), 1e-6)
    with pytest.raises(ValueError, match=r"^prompt x, step 1: .* margin 0\.0001 is not above 10 x bound 1e-05"):
        check("x", logits, np.array([1.0, 1e-4]), 1e-6)
    with pytest.raises(ValueError, match=r"^prompt x, step 0: .* 10 x bound 0\.0002: choose another seed$"):
        check("x", logits, np.array([1.1e-3, 1.0]), 1e-4)
    for scale in (0.4, 2.5):
        with pytest.raises(ValueError, match=r"^prompt x: logit std .* is outside \(0\.5, 2\.0\): choose another"):
            check("x", scale * logits, np.array([1.0]), 1e-6)


def run(monkeypatch, tmp_path, bundle: Bundle, *arguments: str):
    bundle.write(tmp_path / "bundle")
    output = tmp_path / "golden"
    argv = ["golden", "--bundle", str(tmp_path / "bundle"), "--prompts", json.dumps(PROMPTS), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [*argv, *arguments])
    golden.main()
    return read_safetensors(output)


def test_golden_file(small_bundle, tmp_path, monkeypatch, capsys):
    tensors, metadata = run(monkeypatch, tmp_path, small_bundle, "--max-new-tokens", "6")
    assert {name: json.loads(value) for name, value in metadata.items()} == {
        "names": ["short", "longer"],
        "max_new_tokens": 6,
        "stop_token_ids": [],
    }
    double, single = Model(small_bundle), Model(small_bundle, np.float32)
    for prompt in PROMPTS:
        prefix = prompt["name"] + "."
        tokens, logits = tensors[prefix + "tokens"], tensors[prefix + "logits"]
        assert tensors[prefix + "prompt"].tolist() == prompt["tokens"]
        sequence = np.array([*prompt["tokens"], *tokens[:-1]])
        want, noisy = (m.forward(sequence, m.empty_kv(20), 0, chain(len(sequence)))[-6:] for m in (double, single))
        assert tokens.dtype == np.int32 and tokens.tolist() == want.argmax(axis=1).tolist()
        assert logits.dtype == np.float32 and np.abs(logits - want).max() < 2e-7
        assert tensors[prefix + "noise"].item() == pytest.approx(np.abs(noisy - want).max(), rel=1e-6)
        top = np.sort(want)[:, ::-1]
        np.testing.assert_allclose(tensors[prefix + "margin"], top[:, 0] - top[:, 1], atol=1e-12)
    assert "longer: 4 + 6 tokens" in capsys.readouterr().out


def test_stop_tokens_cut(small_bundle, tmp_path, monkeypatch):
    full, _ = run(monkeypatch, tmp_path, small_bundle, "--max-new-tokens", "6")
    stop = full["longer.tokens"][2].item()
    cut, metadata = run(monkeypatch, tmp_path, small_bundle, "--max-new-tokens", "6", "--stop-token-ids", f"[{stop}]")
    end = full["longer.tokens"].tolist().index(stop) + 1
    assert cut["longer.tokens"].tolist() == full["longer.tokens"].tolist()[:end]
    assert len(cut["longer.logits"]) == len(cut["longer.margin"]) == end
    assert metadata["stop_token_ids"] == f"[{stop}]"


def test_context_length(small_model, tmp_path, monkeypatch):
    bundle = generate_bundle(small_model | {"max_position_embeddings": 9}, "float32")
    run(monkeypatch, tmp_path, bundle, "--max-new-tokens", "5")
    (tmp_path / "golden").unlink()
    with pytest.raises(ValueError, match=r"^prompts\.longer: 4 tokens: with 6 new ones over the context of 9$"):
        run(monkeypatch, tmp_path, bundle, "--max-new-tokens", "6")
    assert not (tmp_path / "golden").exists()


def test_a_flat_model_is_refused(small_bundle, tmp_path, monkeypatch):
    tensors = dict(small_bundle.tensors)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * np.float32(0.01)
    with pytest.raises(ValueError, match="prompt short: logit std"):
        run(monkeypatch, tmp_path, Bundle(small_bundle.fields, None, tensors), "--max-new-tokens", "6")


def test_stages_fail_with_one_line(capsys):
    def broken():
        raise ValueError("x: 1: wrong")

    with pytest.raises(SystemExit) as caught:
        stage.run(broken)
    assert caught.value.code == 2 and capsys.readouterr().err == "error: x: 1: wrong\n"
