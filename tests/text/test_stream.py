"""Text out of tokens as they come: whole characters, and stop strings wherever they end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text import TextStream
from engine.tokenizer import Tokenizer, byte_tokenizer

SPECIAL = 256
TOKENIZER = Tokenizer(lambda text: list(text.encode()), byte_tokenizer().vocabulary, {SPECIAL: "<|im_end|>"})


def pieces(tokens, stop=()):
    stream = TextStream(TOKENIZER, stop)
    made = []
    for token in tokens:
        made.append(stream.feed(token))
        if stream.stopped is not None:
            break
    return [*made, stream.finish()], stream.stopped


@given(st.text())
def test_pieces_add_up_and_each_is_whole_characters(text):
    made, _ = pieces(text.encode())
    assert "".join(made) == text
    assert "\ufffd" not in "".join(made) or "\ufffd" in text


@given(st.binary())
def test_any_bytes_decode_as_in_one_go(data):
    assert "".join(pieces(data)[0]) == data.decode(errors="replace")


def test_a_character_comes_with_its_last_byte():
    assert pieces("é🌲x".encode())[0] == ["", "é", "", "", "", "🌲", "x", ""]


def test_an_unfinished_character_shows_at_the_end():
    assert pieces("🌲".encode()[:3])[0] == ["", "", "", "\ufffd"]


def test_special_tokens_give_no_text():
    assert pieces([*b"ab", SPECIAL, *b"c", SPECIAL])[0] == ["a", "b", "", "c", "", ""]
    assert "".join(pieces(["é".encode()[0], SPECIAL, "é".encode()[1]])[0]) == "\ufffd\ufffd"


def test_ids_without_a_token():
    assert "".join(pieces([65, 999, 66])[0]) == "A\ufffdB"


@pytest.mark.parametrize(
    ("text", "stop", "shown", "met"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "two"], "one ", "two"),
        ("abcabd", ["abd"], "abc", "abd"),
        ("aaab", ["aab"], "a", "aab"),
        ("abab", ["abc"], "abab", None),
        ("xyz", ["z"], "xy", "z"),
        ("xyz", [""], "xyz", None),
        ("\n\nEND", ["\n\nEND", "\n\n"], "", "\n\n"),
        ("日本語です", ["語で"], "日本", "語で"),
        ("stop at once", ["stop"], "", "stop"),
    ],
)
def test_stop_strings(text, stop, shown, met):
    made, stopped = pieces(text.encode(), stop)
    assert ("".join(made), stopped) == (shown, met)


def test_the_first_place_wins_where_one_token_completes_several():
    tokenizer = Tokenizer(list, {0: b"one two three", 1: b" four"}, {})
    for stop, shown, met in (
        (["three", "two"], "one ", "two"),
        (["e t", "two t"], "on", "e t"),
        (["four"], None, "four"),
    ):
        stream = TextStream(tokenizer, stop)
        assert stream.feed(0) + stream.feed(1) == ("one two three " if shown is None else shown)
        assert stream.stopped == met and stream.finish() == ""


@given(st.text(alphabet="abé"), st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))
def test_nothing_from_a_stop_string_on_is_ever_given_out(text, stop):
    """Against the plain statement: the text before whichever stop string is complete first."""
    made, stopped = pieces(text.encode(), stop)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not ends:
        assert ("".join(made), stopped) == (text, None)
        return
    end = min(ends)[0]
    begin = min(text.find(s) for s in stop if text[:end].endswith(s))
    assert "".join(made) == text[:begin] and stopped in stop
    for n in range(len(made)):
        assert text.startswith("".join(made[:n]))
