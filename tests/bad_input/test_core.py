"""What the core refuses by itself: a model that no loader has checked, options and requests out of range."""

import dataclasses

import pytest

from engine.bundle import TensorView, open_bundle
from engine.native import Drafter, Engine, EngineError

OPTIONS = {"context": 20, "block_size": 4, "tree_budget": 6}
MANY = 10**9


@pytest.fixture
def model(bundle):
    return open_bundle(bundle)


def refusal(library_path, model, **options) -> str:
    with pytest.raises(EngineError) as caught:
        Engine(library_path, model, **(OPTIONS | options))
    message = str(caught.value)
    assert message.isprintable() and message.count(": ") >= 2
    return message


SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
         "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
         "num_experts_per_tok", "n_group", "topk_group", "moe_layer_freq"]  # fmt: skip


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [MANY, -1, -(2**31), 2**31 - 1])
def test_size(library_path, model, field, value):
    wrong = dataclasses.replace(model, config=dataclasses.replace(model.config, **{field: value}))
    assert refusal(library_path, wrong).startswith(f"{field}: {value}: must lie in ")


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [2**31, 2**32 + 2, -(2**31) - 1])
def test_size_beyond_32_bits(library_path, model, field, value):
    """Refused, where ctypes would keep the low bits: 2^32 + 2 would be 2."""
    wrong = dataclasses.replace(model, config=dataclasses.replace(model.config, **{field: value}))
    assert refusal(library_path, wrong) == f"{field}: {value}: does not fit 32 bits"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim: 5: must be even"),
        ({"num_attention_heads": 2**20, "qk_nope_head_dim": 2**20}, "num_attention_heads: 1048576: makes "),
        ({"num_attention_heads": 2**20, "kv_lora_rank": 2**20}, "num_attention_heads: 1048576: makes "),
        ({"num_hidden_layers": 2**20, "kv_lora_rank": 2**20}, "num_hidden_layers: 1048576: makes "),
        ({"n_routed_experts": 2**20, "moe_intermediate_size": 2**20}, "n_shared_experts: 1: makes 2097152"),
        ({"n_shared_experts": 2**20, "moe_intermediate_size": 2**20}, "n_shared_experts: 1048576: makes "),
        ({"hidden_size": 64}, "model.embed_tokens.weight: shape: [17, 32]: must be [17, 64]"),
        ({"num_experts_per_tok": 3}, "operator moe_route: top_k: "),
        ({"n_group": 3}, "operator moe_route: n_group: "),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: "),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: 0.000000: "),
        ({"rope_theta": 1.0}, "rope_theta: 1.000000: must exceed 1"),
    ],
)
def test_config(library_path, model, changes, expected):
    if "n_routed_experts" in changes:
        expected = "n_routed_experts: 1048576: makes 1099511627776 in all, more than 1073741824"
        changes = changes | {"n_shared_experts": 0}
    wrong = dataclasses.replace(model, config=dataclasses.replace(model.config, **changes))
    assert refusal(library_path, wrong).startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"context": 1}, "context: 1: must lie in 2..1073741824"),
        ({"context": -20}, "context: -20: must lie in "),
        ({"context": 2**31}, "context: 2147483648: does not fit 32 bits"),
        ({"block_size": 0}, "block_size: 0: must lie in 1..1048576"),
        ({"tree_budget": -1}, "tree_budget: -1: must lie in 0..1048576"),
        ({"tree_budget": 10**9}, "tree_budget: 1000000000: must lie in "),
        ({"prefill_chunk": 0}, "prefill_chunk: 0: must lie in 1..1048576"),
        ({"drafter": Drafter("noisy", 1.5)}, "operator draft_script: p: must lie in 0..1"),
        ({"drafter": Drafter("noisy", float("nan"))}, "operator draft_script: p: must lie in 0..1"),
    ],
)
def test_options(library_path, model, options, expected):
    assert refusal(library_path, model, **options).startswith(expected)


def test_tensors(library_path, model):
    name = "model.layers.0.mlp.gate_proj.weight"

    def refused(**tensors):
        changed = {key: tensor for key, tensor in (model.tensors | tensors).items() if tensor}
        return refusal(library_path, dataclasses.replace(model, tensors=changed))

    tensor = model.tensors[name]
    assert refused(**{name: None}) == f"{name}: missing: the config asks for this tensor"
    assert refused(**{name: TensorView("I32", tensor.array)}) == f"{name}: dtype 2: must be F32 or BF16"
    assert refused(**{name: TensorView("F32", tensor.array[:-1])}).startswith(f"{name}: shape: [31, 32]: ")
    stem = name.removesuffix(".weight")
    assert refused(**{stem + ".qw": tensor}).startswith(f"{stem}.qw: INT4 codes: the config has no group_size")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"prompt": []}, "prompt: empty: "),
        ({"prompt": [1] * 20}, "prompt: 20 tokens: the context holds 20"),
        ({"prompt": [17]}, "prompt: 17: outside the vocabulary of 17"),
        ({"prompt": [-1]}, "prompt: -1: outside the vocabulary of 17"),
        ({"prompt": [2**32 + 1]}, f"prompt: {2**32 + 1}: outside every vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0: must be positive"),
        ({"max_new_tokens": 2**32 + 1}, f"max_new_tokens: {2**32 + 1}: does not fit 32 bits"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids: 1025: must lie in 0..1024"),
        ({"script": [1, 99]}, "script: 99: outside the vocabulary of 17"),
        ({"overrun": 5}, "overrun: 5: must lie in 0..4"),
        ({"overrun": -1}, "overrun: -1: must lie in 0..4"),
        ({"overrun": 1, "mode": "ddtree"}, "overrun: 1: must lie in 0..0"),
        ({"kept": 1}, "kept: 1: must leave at least the last of 1 prompt tokens"),
        ({"kept": -1}, "kept: -1: must leave "),
    ],
)
def test_request(library_path, model, request_, expected):
    """Refused; and the engine decodes the next one as if nothing had been."""
    good = {"mode": "ar", "max_new_tokens": 4}
    with Engine(library_path, model, **OPTIONS) as engine:
        before = engine.generate([1], **good)
        request = {"prompt": [1], **good} | request_
        with pytest.raises(EngineError) as caught:
            engine.generate(request.pop("prompt"), **request)
        assert str(caught.value).startswith(expected)
        assert engine.generate([1], **good) == before


def test_memory_that_is_promised_but_not_there(library):
    """Linux would hand out more than it has, and kill who uses it."""
    available = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable")) << 10
    assert not library.allocate(available + (256 << 20))
    library.release(library.allocate(64 << 20))


def test_kv_rows_outside_the_pool(library_path, model):
    with Engine(library_path, model, **OPTIONS) as engine, pytest.raises(EngineError, match="the pool has"):
        engine.read_kv(10_000)
