"""The engine's loops against the reference's, on models of every shape that a config can ask for."""

import dataclasses

import numpy as np
import pytest

from engine.bundle import TensorView, open_bundle
from engine.native import Drafter, Engine, EngineError
from engine.run import record
from reference.bundle import Bundle, f32_to_bf16
from reference.decode import decode_ar, decode_ddtree
from reference.drafters import draft_script
from reference.model import Model
from reference.quantize import quantize_bundle
from reference.weights import generate_bundle

YARN = {
    "type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
BASE = {
    "seed": 5,
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 512,
}
VARIANTS = {
    "base": {},
    "no_q_lora": {"q_lora_rank": None},
    "groups": {"n_group": 4, "topk_group": 2},
    "no_shared_expert": {"n_shared_experts": 0},
    "two_shared_experts": {"n_shared_experts": 2},
    "no_yarn": {"rope_scaling": None},
    "weights_not_normalised": {"norm_topk_prob": False},
    "every_second_layer_moe": {"moe_layer_freq": 2, "first_k_dense_replace": 0},
    "every_second_layer_moe_from_the_second": {"moe_layer_freq": 2, "first_k_dense_replace": 1},
    "mscales_differ": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "dense": {"first_k_dense_replace": 3},
    "odd_widths": {
        "vocab_size": 301,
        "hidden_size": 36,
        "intermediate_size": 50,
        "moe_intermediate_size": 20,
        "kv_lora_rank": 20,
        "v_head_dim": 10,
        "qk_nope_head_dim": 6,
        "num_attention_heads": 3,
    },
}
PROMPT = [7, 0, 299, 41, 41, 3]
NEW = 20
BLOCK = 5


def save(bundle, path):
    bundle.write(path)
    return open_bundle(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The plain model, as the reference and as the engine reads it."""
    bundle = generate_bundle(BASE, "float32")
    return bundle, save(bundle, tmp_path_factory.mktemp("base") / "base.safetensors")


def engine_for(library_path, opened, **options):
    return Engine(library_path, opened, **({"context": 64, "block_size": BLOCK, "tree_budget": 9} | options))


def script_of(bundle):
    return [*PROMPT, *decode_ar(Model(bundle), PROMPT, NEW + BLOCK).tokens]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("variant", "group"), [(v, g) for v in VARIANTS for g in (None, 32) if not (v == "odd_widths" and g)]
)
def test_decodes_like_the_reference(library_path, tmp_path, variant, group, dtype):
    bundle = generate_bundle(BASE | VARIANTS[variant], dtype)
    if group:
        bundle = quantize_bundle(bundle, group)
    exact, single = (decode_ar(Model(bundle, t), PROMPT, NEW) for t in (np.float64, np.float32))
    noise = np.abs(np.stack(exact.logits) - np.stack(single.logits)).max()
    with engine_for(library_path, save(bundle, tmp_path / "b.safetensors")) as engine:
        made, _ = record(engine, PROMPT, mode="ar", max_new_tokens=NEW)
    assert made["tokens"].tolist() == exact.tokens
    assert np.abs(made["logits"] - np.stack(exact.logits)).max() <= max(1e-5, 2 * noise)


def test_weights_are_rounded_to_nearest_even_for_bf16(library_path, base, tmp_path):
    """float32 weights under bf16 activations: the bytes of weights that were rounded beforehand."""
    bundle, opened = base
    kept = "e_score_correction_bias"  # float32 in every bundle
    rounded = {name: x if name.endswith(kept) else f32_to_bf16(x) for name, x in bundle.tensors.items()}
    beforehand = save(Bundle(bundle.fields, None, rounded), tmp_path / "rounded.safetensors")
    made = []
    for model in (opened, beforehand):
        with engine_for(library_path, model, activations="bfloat16") as engine:
            made.append(record(engine, PROMPT, mode="ar", max_new_tokens=NEW)[0])
    assert made[0]["logits"].tobytes() == made[1]["logits"].tobytes()


@pytest.mark.parametrize("kind", ["oracle", "noisy", "adversarial"])
@pytest.mark.parametrize("budget", [0, 1, 9, 400])
def test_tree_rounds_are_the_references(library_path, base, kind, budget):
    bundle, opened = base
    script, drafter = script_of(bundle), {"kind": kind, "p": 0.4, "seed": 3}
    expected = decode_ddtree(
        Model(bundle),
        PROMPT,
        NEW,
        lambda prefix: draft_script(
            **drafter, script=script, prefix=prefix, levels=BLOCK - 1, vocab=BASE["vocab_size"]
        ),
        budget,
    )
    with engine_for(library_path, opened, tree_budget=budget, drafter=Drafter(**drafter)) as engine:
        result = engine.generate(PROMPT, mode="ddtree", max_new_tokens=NEW, script=script)
        assert (result.tokens, result.steps, result.committed) == (expected.tokens, expected.steps, expected.committed)


def test_stop_token_inside_a_path(library_path, base):
    bundle, opened = base
    script = script_of(bundle)
    output = script[len(PROMPT) :]
    with engine_for(library_path, opened) as engine:
        for stop in set(output):
            cut = output[: output.index(stop) + 1]
            result = engine.generate(
                PROMPT, mode="ddtree", max_new_tokens=len(output), stop_token_ids=[stop], script=script
            )
            assert (result.tokens, result.stop_reason) == (
                cut,
                "stop" if len(cut) < len(output) else result.stop_reason,
            )


def test_limit_inside_a_path(library_path, base):
    bundle, opened = base
    script = script_of(bundle)
    with engine_for(library_path, opened) as engine:
        for limit in range(1, 2 * BLOCK + 2):
            result = engine.generate(PROMPT, mode="ddtree", max_new_tokens=limit, script=script)
            assert (result.tokens, result.stop_reason) == (script[len(PROMPT) :][:limit], "length")


def test_context_ends_the_output(library_path, base):
    bundle, opened = base
    script = script_of(bundle)
    with engine_for(library_path, opened, context=len(PROMPT) + 7) as engine:
        for mode in ("ar", "ddtree"):
            result = engine.generate(PROMPT, mode=mode, max_new_tokens=NEW, script=script)
            assert (result.tokens, result.stop_reason) == (script[len(PROMPT) :][:7], "context")


def test_an_engine_can_be_used_again(library_path, base):
    """What a longer run left in the pool, the tree's rows too, must not matter."""
    bundle, opened = base
    script = script_of(bundle)
    with engine_for(library_path, opened, drafter=Drafter("noisy", 0.5, 1)) as engine:
        fresh, _ = record(engine, PROMPT, mode="ddtree", max_new_tokens=NEW, script=script)
        engine.generate(list(range(30)), mode="ddtree", max_new_tokens=30, script=list(range(64)))
        again, _ = record(engine, PROMPT, mode="ddtree", max_new_tokens=NEW, script=script)
    assert all(fresh[name].tobytes() == again[name].tobytes() for name in fresh)


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_prefill_chunks_change_no_byte(library_path, base, chunk):
    _, opened = base
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, 300, 23)]
    runs = []
    for size in (chunk, 64):
        with engine_for(library_path, opened, prefill_chunk=size) as engine:
            runs.append(record(engine, prompt, mode="ar", max_new_tokens=4)[0])
    assert all(runs[0][name].tobytes() == runs[1][name].tobytes() for name in runs[0])


def test_overrun_goes_on_past_the_end(library_path, base):
    bundle, opened = base
    script = script_of(bundle)
    with engine_for(library_path, opened) as engine:
        made, _ = record(
            engine, PROMPT, mode="ar", max_new_tokens=NEW, stop_token_ids=[script[len(PROMPT) + 3]], overrun=4
        )
    assert [*made["tokens"], *made["overrun"]] == script[len(PROMPT) :][: len(made["tokens"]) + 4]


def test_rounds_can_be_cancelled_and_their_errors_get_out(library_path, base):
    bundle, opened = base
    with engine_for(library_path, opened) as engine:
        result = engine.generate(PROMPT, mode="ar", max_new_tokens=NEW, on_round=lambda round_: True)
        assert (len(result.tokens), result.stop_reason) == (1, "cancelled")

        def fail(_):
            raise KeyError("from a round")

        with pytest.raises(KeyError, match="from a round"):
            engine.generate(PROMPT, mode="ar", max_new_tokens=NEW, on_round=fail)
        assert engine.generate(PROMPT, mode="ar", max_new_tokens=NEW).tokens == script_of(bundle)[len(PROMPT) :][:NEW]


def test_a_row_of_nan_stops_the_run(library_path, base):
    _, opened = base
    head = opened.tensors["lm_head.weight"]
    broken = dataclasses.replace(
        opened, tensors=opened.tensors | {"lm_head.weight": TensorView(head.dtype, np.full_like(head.array, np.nan))}
    )
    with engine_for(library_path, broken) as engine, pytest.raises(EngineError, match="logits: NaN"):
        engine.generate(PROMPT, mode="ar", max_new_tokens=NEW)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt: empty"),
        ([300], {}, "prompt: 300: outside the vocabulary of 300"),
        ([-1], {}, "prompt: -1: outside the vocabulary"),
        ([1] * 64, {}, "prompt: 64 tokens: the context holds 64"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens: 0"),
    ],
)
def test_requests_that_cannot_be(library_path, base, prompt, options, message):
    with engine_for(library_path, base[1]) as engine, pytest.raises(EngineError, match=message):
        engine.generate(prompt, **({"mode": "ar", "max_new_tokens": 3} | options))


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["oracle", "noisy", "adversarial"])
def test_tree_and_plain_decoding_are_bitwise_equal(library_path, base, activations, kind):
    _, opened = base
    with engine_for(library_path, opened, activations=activations, drafter=Drafter(kind, 0.3, 1)) as engine:
        plain, _ = record(engine, PROMPT, mode="ar", max_new_tokens=NEW, overrun=BLOCK)
        script = [*PROMPT, *plain["tokens"].tolist(), *plain["overrun"].tolist()]
        tree, _ = record(engine, PROMPT, mode="ddtree", max_new_tokens=NEW, script=script)
    rows, positions = len(tree["logits"]), tree["kv"].shape[1]
    assert tree["tokens"].tobytes() == plain["tokens"].tobytes()
    assert tree["logits"].tobytes() == plain["logits"][:rows].tobytes()
    assert tree["kv"].tobytes() == np.ascontiguousarray(plain["kv"][:, :positions]).tobytes()
