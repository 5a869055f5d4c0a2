"""engine.Engine: text in and out, stops, conversations that keep their KV rows, memory that goes with close()."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import engine
from engine.text import UsageError

PROMPT = "def walk(tree):"
NO_STOP = {"stop_token_ids": []}


@pytest.fixture(scope="module")
def plain(model):
    """64 tokens that nothing stops."""
    return model.generate(PROMPT, max_new_tokens=64, **NO_STOP)


def test_whole_and_pieces_are_the_same(model, plain):
    with model.stream(PROMPT, max_new_tokens=64, **NO_STOP) as stream:
        pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == plain.text == stream.result.text
    assert [token for piece in pieces for token in piece.tokens] == plain.tokens == stream.result.tokens
    assert plain.stop_reason == "length" and plain.stats.steps == 63


def test_text_is_that_of_the_tokens(model, plain):
    spelt = b"".join(model.text.tokenizer.bytes_of(token) or b"" for token in plain.tokens)
    assert plain.text == spelt.decode(errors="replace")


def test_ids_as_prompt(model, plain):
    assert model.generate(model.text.encode(PROMPT), max_new_tokens=64, **NO_STOP).tokens == plain.tokens


def test_ddtree_gives_the_same_text(model, plain):
    made = model.generate(PROMPT, mode="ddtree", max_new_tokens=64, **NO_STOP)
    assert (made.tokens, made.text) == (plain.tokens, plain.text)
    assert 1 < made.stats.avg_accept <= 8 and made.stats.steps < 40


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_every_stop_token_stops(model, plain, mode):
    for at in range(1, 40):
        token = plain.tokens[at]
        first = plain.tokens.index(token)
        made = model.generate(PROMPT, mode=mode, max_new_tokens=64, stop_token_ids=[319, token])
        assert made.tokens == plain.tokens[: first + 1] and made.stop_reason == "stop"


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_stop_strings_wherever_they_end(model, plain, mode):
    """At every place of the output, so also inside an accepted path: of one to twelve characters."""
    text = plain.text
    for begin in range(0, len(text) - 12, 5):
        for length in (1, 3, 12):
            stop = text[begin : begin + length]
            if "\ufffd" in stop:
                continue
            made = model.generate(PROMPT, mode=mode, max_new_tokens=64, stop=[stop, "never in there"], **NO_STOP)
            assert made.text == text[: text.index(stop)] and made.stop_reason == "stop_string"
            assert made.tokens == plain.tokens[: len(made.tokens)]
            assert stop in model_text(model, made.tokens) and stop not in model_text(model, made.tokens[:-1])


def model_text(model, tokens) -> str:
    return b"".join(model.text.tokenizer.bytes_of(token) or b"" for token in tokens).decode(errors="replace")


def test_the_checkpoints_own_stop_tokens_are_the_default(model, plain):
    assert model.text.stop_token_ids == [1, 2, 3]  # [EOS] of the tokenizer, config.json, generation_config.json
    made = model.generate(PROMPT, max_new_tokens=64)
    ends = [plain.tokens.index(token) for token in (1, 2, 3) if token in plain.tokens]
    assert made.tokens == plain.tokens[: min(ends) + 1 if ends else None]


def test_prefixes_are_reused_and_change_nothing(model):
    """Prompts that share nothing, a part, or all with what went before."""
    long = model.text.encode("for node in tree: yield node.token " * 8)
    prompts = [long, long[:50], [*long[:20], 7, *long[21:]], long, [9, *long[1:]]]
    fresh = [model.generate(prompt, max_new_tokens=12, reuse_kv=False, **NO_STOP) for prompt in prompts]
    assert all(made.stats.kept_tokens == 0 for made in fresh)
    model.generate([5], max_new_tokens=2, **NO_STOP)
    kept = []
    for prompt, wanted in zip(prompts, fresh, strict=True):
        made = model.generate(prompt, max_new_tokens=12, **NO_STOP)
        assert made.tokens == wanted.tokens
        kept.append(made.stats.kept_tokens)
    assert kept == [0, 49, 20, 20, 0]


def test_what_was_generated_is_reused(model, plain):
    model.generate([5], max_new_tokens=2, **NO_STOP)
    first = model.generate(PROMPT, mode="ddtree", max_new_tokens=20, **NO_STOP)
    longer = [*model.text.encode(PROMPT), *first.tokens]
    made = model.generate(longer, max_new_tokens=44, **NO_STOP)
    assert made.stats.kept_tokens == len(longer) - 1
    assert [*first.tokens, *made.tokens] == plain.tokens


def test_reuse_after_a_stop_inside_a_path(model, plain):
    """Rows that a tree committed past the stop must not be taken for the sequence's."""
    for at in range(3, 20):
        stopped = model.generate(PROMPT, mode="ddtree", max_new_tokens=64, stop_token_ids=[plain.tokens[at]])
        again = [*model.text.encode(PROMPT), *stopped.tokens, 8, 9]
        made = model.generate(again, max_new_tokens=8, **NO_STOP)
        assert made.stats.kept_tokens == len(again) - 3  # the stop token has not been forwarded
        assert made.tokens == model.generate(again, max_new_tokens=8, reuse_kv=False, **NO_STOP).tokens


def test_conversation(model):
    chat = engine.Conversation(model, system="Be brief.")
    answers = [chat.ask(content, max_new_tokens=16, **NO_STOP) for content in ("one", "two", "three")]
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 3]
    assert [message["content"] for message in chat.messages[2::2]] == [answer.text for answer in answers]
    assert answers[0].stats.kept_tokens == 0 or answers[0].stats.kept_tokens < answers[0].stats.prompt_tokens
    turns = [model.encode_chat(chat.messages[: 2 * i + 2]) for i in range(3)]
    for answer, before, now in zip(answers[1:], turns, turns[1:], strict=False):
        assert answer.stats.prompt_tokens == len(now)
        assert answer.stats.kept_tokens >= len(before)  # all of the last turn's prompt


def test_a_stream_can_be_left(model, plain):
    with model.stream(PROMPT, max_new_tokens=400, **NO_STOP) as stream:
        first = [next(stream) for _ in range(3)]
    assert stream.result.stop_reason in ("cancelled", "length")
    tokens = [token for piece in first for token in piece.tokens]
    assert tokens == plain.tokens[: len(tokens)] and len(stream.result.tokens) < 400
    assert model.generate(PROMPT, max_new_tokens=64, **NO_STOP).tokens == plain.tokens


def test_errors_come_to_who_asked(model):
    for prompt, options, message in (
        ([1] * 512, {}, "the context holds 512"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens: 0"),
        ([320], {}, "outside the vocabulary"),
    ):
        with pytest.raises(UsageError, match=message):
            model.generate(prompt, **options)
        with pytest.raises(UsageError, match=message):
            list(model.stream(prompt, **options))
    with pytest.raises(TypeError):
        list(model.stream("x", temperature=1.0))
    assert model.generate("x", max_new_tokens=1).tokens


def test_the_context_ends_the_output(checkpoint, library_path):
    with engine.Engine(checkpoint, library=library_path, context=32) as small:
        made = small.generate([5] * 20, max_new_tokens=100, **NO_STOP)
    assert len(made.tokens) == 12 and made.stop_reason == "context"


def test_progress_counts_every_byte(checkpoint, library_path):
    seen = []
    with engine.Engine(checkpoint, library=library_path, context=32, on_progress=seen.append) as opened:
        assert seen[-1].loaded == seen[-1].total == opened.model.n_bytes
    assert [p.loaded for p in seen] == sorted(p.loaded for p in seen) and len(seen) == len(opened.model.tensors)


def test_some_layers(checkpoint, library_path):
    with engine.Engine(checkpoint, library=library_path, context=32, layers=range(0, 2)) as opened:
        assert opened.config.num_hidden_layers == 2
        assert opened.generate("x", max_new_tokens=4, **NO_STOP).tokens


def address_space() -> int:
    gc.collect()
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))


def test_close_gives_memory_back(checkpoint, library_path):
    """A context of 16,384 makes a KV pool of 12 MB, beside the weights."""
    sizes = []
    for _ in range(4):
        with engine.Engine(checkpoint, library=library_path, context=16384, tree_budget=0) as opened:
            opened.generate([5] * 64, max_new_tokens=2, **NO_STOP)
        sizes.append(address_space())
    assert sizes[-1] - sizes[0] < 12 << 20, sizes
    assert not [thread for thread in threading.enumerate() if "kdtree" in thread.name]


def test_importing_the_package_loads_nothing_heavy():
    """Every stage of the ladder imports it."""
    code = "import engine, sys; print('numpy' in sys.modules); engine.Engine; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["False", "True"]


def test_the_first_piece_comes_before_the_last(model):
    begin = time.perf_counter()
    times = []
    with model.stream([5], max_new_tokens=400, **NO_STOP) as stream:
        for _ in stream:
            times.append(time.perf_counter() - begin)
    assert times[0] < times[-1] / 2
