"""Tokenizers of folders: ids as the packages themselves give them, bytes that add up to the text."""

import base64
import json

import pytest

tokenizers = pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")

from engine.text import UsageError, byte_text, open_text  # noqa: E402
from engine.tokenizer import KIMI_PATTERN, TextError, open_tokenizer, stop_tokens  # noqa: E402
from tests.text import folders  # noqa: E402

VOCAB = 700
TEXTS = [
    "def walk(tree):",
    "",
    " ",
    "naïve café 草稿树 🌲🌳",
    "a\n\n  b\t\r\n",
    "ﬁn\u0301e 12345",
    "\x00\x7f",
    "<|im_user|>hi<|im_end|>",
]


@pytest.fixture(scope="module", params=["json", "tiktoken"])
def folder(request, tmp_path_factory):
    write = folders.write_json_tokenizer if request.param == "json" else folders.write_tiktoken
    return write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return open_tokenizer(folder, VOCAB)


def spelt(tokenizer, tokens) -> bytes:
    """All tokens as bytes, special ones by their names."""
    return b"".join(
        tokenizer.special[token].encode() if token in tokenizer.special else tokenizer.vocabulary[token]
        for token in tokens
    )


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_bytes_of_tokens_are_the_text(tokenizer, text):
    assert spelt(tokenizer, tokenizer.encode(text)) == text.encode()


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_ids_are_those_of_the_package(folder, tokenizer, text):
    if (folder / "tokenizer.json").exists():
        wanted = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    else:
        ranks = {token: rank for rank, token in enumerate(folders.merges())}
        special = {name: len(ranks) + i for i, name in enumerate([*folders.SPECIAL, "<think>"])}
        package = tiktoken.Encoding("t", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special)
        wanted = package.encode(text, allowed_special="all")
    assert tokenizer.encode(text) == wanted


def test_merges_and_special_tokens_are_used(tokenizer):
    assert len(tokenizer.encode(" tree node self")) < 10
    ids = tokenizer.encode("<|im_user|>x<think>")
    assert len(ids) == 3 and ids[0] in tokenizer.special
    assert ids[2] not in tokenizer.special and tokenizer.bytes_of(ids[2]) == b"<think>"


def test_kimi_pattern_splits_as_the_release_does():
    """The splits that another implementation's tests give for the released tokenizer."""
    import regex

    pattern = KIMI_PATTERN.replace("&&[^", "--[").replace("[[", "[")
    split = regex.compile(pattern, regex.V1).findall
    assert split("中文English混合") == ["中文", "English", "混合"]
    assert split("汉字abc") == ["汉字", "abc"]
    assert split("北京市 Pascal") == ["北京市", " Pascal"]
    assert split("1234567") == ["123", "456", "7"]
    assert split("don't  stop\n\nit") == ["don't", " ", " stop", "\n\n", "it"]


def test_ids_without_a_name_are_reserved(tmp_path):
    tokenizer = open_tokenizer(folders.write_tiktoken(tmp_path), VOCAB)
    first = len(folders.merges())
    assert tokenizer.special[first] == "[BOS]"
    assert tokenizer.special[first + 100] == f"<|reserved_token_{first + 100}|>"
    assert max(tokenizer.special) == first + 255


def test_bos_is_put_before_a_plain_prompt_if_the_folder_wants_it(tmp_path):
    folders.write_json_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    text = open_text_of(tmp_path)
    plain = text.tokenizer.encoder("def")
    assert text.encode("def") == [0, *plain]
    assert text.encode("[BOS]def") == [0, *plain]
    assert text.encode_chat([{"role": "user", "content": "def"}])[0] != 0


def open_text_of(folder, vocab_size=VOCAB):
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text("{}")
    return open_text(folder, vocab_size)


def test_every_source_of_stop_tokens_counts(tmp_path):
    tokenizer = open_tokenizer(folders.write_json_tokenizer(tmp_path), VOCAB)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 20, "text_config": {"eos_token_id": [30, 31]}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [40]}))
    eos = folders.SPECIAL.index("[EOS]")
    assert stop_tokens(tmp_path, tokenizer) == [eos, 20, 30, 31, 40]
    assert stop_tokens(tmp_path, None) == [20, 30, 31, 40]


def test_prompts_that_cannot_be(tmp_path):
    text = open_text_of(folders.write_json_tokenizer(tmp_path))
    for prompt, message in (
        ("", "prompt: empty"),
        ([], "prompt: empty"),
        ("<|im_end|>[BOS]", "special tokens only"),
        ([700], "prompt: 700: outside the vocabulary of 700"),
        ([-1], "prompt: -1: outside"),
    ):
        with pytest.raises(UsageError, match=message):
            text.encode(prompt)
    with pytest.raises(UsageError, match="this model has no tokenizer"):
        byte_text(255).encode("a")
    with pytest.raises(UsageError, match="no chat template"):
        byte_text(256).encode_chat([])


def damaged(write, file, change):
    def make(folder):
        write(folder)
        (folder / file).write_bytes(change((folder / file).read_bytes()))
        return folder

    return make


def without_rank(data: bytes) -> bytes:
    return b"\n".join(data.splitlines()[:-3] + data.splitlines()[-2:])


BAD = {
    "larger than the vocabulary": (folders.write_json_tokenizer, 290, r"tokenizer\.json: token 299: .* is 290"),
    "more ranks than the vocabulary": (folders.write_tiktoken, 200, r"tiktoken\.model: token \d+: .*vocabulary is 200"),
    "no JSON": (
        damaged(folders.write_json_tokenizer, "tokenizer.json", lambda data: data[:1000]),
        VOCAB,
        r"tokenizer\.json: tokenizer: .*cannot be read",
    ),
    "not byte-level": (
        damaged(
            folders.write_json_tokenizer,
            "tokenizer.json",
            lambda data: json.dumps(json.loads(data) | {"decoder": {"type": "Fuse"}}).encode(),
        ),
        VOCAB,
        r"tokenizer\.json: decoder: .*only byte-level",
    ),
    "no base64": (
        damaged(folders.write_tiktoken, "tiktoken.model", lambda data: b"\xff\xfe 0\n" + data),
        VOCAB,
        r"tiktoken\.model: line 1: .*must be a token in base64",
    ),
    "a rank is missing": (damaged(folders.write_tiktoken, "tiktoken.model", without_rank), VOCAB, r"ranks: \d+: must"),
    "a byte is missing": (
        damaged(
            folders.write_tiktoken,
            "tiktoken.model",
            lambda data: data.replace(base64.b64encode(b"\x05") + b" ", base64.b64encode(b"qqq") + b" "),
        ),
        VOCAB,
        r"tiktoken\.model: byte 5: missing",
    ),
    "settings are no JSON": (
        damaged(folders.write_tiktoken, "tokenizer_config.json", lambda data: b"{"),
        VOCAB,
        r"tokenizer_config\.json: file: .*no JSON",
    ),
    "an added token without a name": (
        damaged(folders.write_tiktoken, "tokenizer_config.json", lambda data: b'{"added_tokens_decoder": {"600": 5}}'),
        VOCAB,
        r"tokenizer_config\.json: added_tokens_decoder: 600",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tokenizers(name, tmp_path):
    write, vocab_size, message = BAD[name]
    with pytest.raises(ValueError, match=message) as raised:
        open_tokenizer(write(tmp_path), vocab_size)
    assert str(raised.value).startswith(str(tmp_path)) and "\n" not in str(raised.value)


def test_no_tokenizer(tmp_path):
    with pytest.raises(TextError, match="there is no tokenizer"):
        open_tokenizer(tmp_path, VOCAB)
    assert open_text_of(tmp_path).tokenizer is None
