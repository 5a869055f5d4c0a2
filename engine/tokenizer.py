"""A checkpoint's tokenizer: `tokenizer.json`, or `tiktoken.model` as the Kimi releases have it; and its stop tokens.

A tokenizer here is a byte-level one: every token stands for bytes of UTF-8.
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint import read_json
from reference.config import short

BYTES = 256
TOKENIZERS = ("tokenizer.json", "tiktoken.model")
RESERVED = 256  # special tokens behind the ranks of a tiktoken.model

# How the Kimi releases split text before merging: runs of Han apart, letters by case, numbers by three. The release has
# it in code, which is not executed here.
KIMI_PATTERN = "|".join((
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip


class TextError(ValueError):
    """A tokenizer or a template that cannot be used: `<file>: <field>: <value>: <reason>`."""


@dataclass(frozen=True)
class Tokenizer:
    """`vocabulary` and `special` share the ids; a special token is part of prompts, not of the text
    that comes out."""

    encoder: Callable[[str], list[int]]  # special tokens spelt out in the text recognised
    vocabulary: Mapping[int, bytes]
    special: Mapping[int, str]
    bos: int | None = None  # put before a plain prompt

    def encode(self, text: str) -> list[int]:
        """The tokens of a plain prompt."""
        tokens = self.encoder(text)
        return [self.bos, *tokens] if self.bos is not None and tokens[:1] != [self.bos] else tokens

    def bytes_of(self, token: int) -> bytes | None:
        """What the token adds to the text; None for a special token, U+FFFD for an id without a token."""
        if token in self.special:
            return None
        return self.vocabulary.get(token, "\ufffd".encode())


def byte_tokenizer() -> Tokenizer:
    """Of generated models: a text is its UTF-8 bytes as tokens."""
    return Tokenizer(lambda text: list(text.encode()), {i: bytes([i]) for i in range(BYTES)}, {})


def open_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint: `tokenizer.json`, or `tiktoken.model` as the Kimi releases have it."""
    path = next((path for name in TOKENIZERS if (path := Path(folder) / name).is_file()), None)
    if path is None:
        raise TextError(f"{folder}: {' or '.join(TOKENIZERS)}: missing: there is no tokenizer")
    make = _from_json if path.name == TOKENIZERS[0] else _from_tiktoken
    tokenizer = make(path, read_settings(path.parent), vocab_size)
    most = max((*tokenizer.vocabulary, *tokenizer.special), default=0)
    if most >= vocab_size:
        name = tokenizer.special.get(most, tokenizer.vocabulary.get(most))
        raise TextError(f"{path}: token {most}: {short(name)}: the model's vocabulary is {vocab_size}")
    return tokenizer


def stop_tokens(folder: str | Path, tokenizer: Tokenizer | None) -> list[int]:
    """Every id that ends a text, for releases disagree: those of config.json (text part too), generation_config.json,
    and the token that tokenizer_config.json calls eos."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    places = [config, config.get("text_config") or {}]
    if (folder / "generation_config.json").is_file():
        places.append(read_json(folder / "generation_config.json"))
    found = set()
    for place in places:
        ids = place.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        found |= {token for token in ids if isinstance(token, int)}
    if tokenizer:
        eos = name_of(read_settings(folder).get("eos_token"))
        found |= {token for token, name in tokenizer.special.items() if name == eos}
    return sorted(found)


def read_settings(folder: Path) -> dict:
    """tokenizer_config.json, where there is one."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def name_of(token: object) -> str | None:
    """A token is given as text, or as a map with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _bos(settings: dict, special: Mapping[int, str]) -> int | None:
    """The token to put before a plain prompt, if the folder wants one."""
    if settings.get("add_bos_token") is not True:
        return None
    name = name_of(settings.get("bos_token"))
    return next((token for token, text in special.items() if text == name), None)


def _from_json(path: Path, settings: dict, vocab_size: int) -> Tokenizer:
    import tokenizers

    try:
        content = path.read_text(encoding="utf-8")
        kinds = json.dumps(json.loads(content).get("decoder"))
        tokenizer = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the package raises plain Exception
        raise TextError(f"{path}: tokenizer: {short(error)}: cannot be read") from None
    if '"ByteLevel"' not in kinds:
        raise TextError(f"{path}: decoder: {short(kinds)}: only byte-level tokenizers are supported")
    added = tokenizer.get_added_tokens_decoder()
    letters = _byte_letters()
    vocabulary = {}
    for text, token in tokenizer.get_vocab(with_added_tokens=False).items():
        vocabulary[token] = b"".join(bytes([letters[c]]) if c in letters else c.encode() for c in text)
    vocabulary |= {token: a.content.encode() for token, a in added.items() if not a.special}
    special = {token: a.content for token, a in added.items() if a.special}
    return Tokenizer(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, vocabulary, special,
                     _bos(settings, special))  # fmt: skip


def _byte_letters() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(BYTES + i): byte for i, byte in enumerate(others)}


def _from_tiktoken(path: Path, settings: dict, vocab_size: int) -> Tokenizer:
    import tiktoken

    ranks = _read_ranks(path)
    named, plain = {}, {}
    for token, entry in (settings.get("added_tokens_decoder") or {}).items():
        if (name := name_of(entry)) is None or not token.isdecimal():
            raise TextError(f"{path.with_name('tokenizer_config.json')}: added_tokens_decoder: {short(token)}: "
                            "must be an id with its content")  # fmt: skip
        (named if entry.get("special", True) else plain)[int(token)] = name
    reserved = range(len(ranks), min(len(ranks) + RESERVED, vocab_size))
    special = {token: f"<|reserved_token_{token}|>" for token in reserved if token not in plain} | named
    try:
        encoding = tiktoken.Encoding(
            path.name,
            pat_str=KIMI_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={name: token for token, name in (special | plain).items()},
        )
    except Exception as error:
        raise TextError(f"{path}: tokenizer: {short(error)}: cannot be built") from None
    vocabulary = {token: text for text, token in ranks.items()} | {i: name.encode() for i, name in plain.items()}
    return Tokenizer(lambda text: encoding.encode(text, allowed_special="all"), vocabulary, special,
                     _bos(settings, special))  # fmt: skip


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Lines of a token in base64 and its rank."""
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TextError(f"{path}: line {number}: {short(line)}: must be a token in base64 and its rank") from None
    if set(ranks.values()) != set(range(len(ranks))):
        raise TextError(f"{path}: ranks: {len(ranks)}: must be 0 to {len(ranks) - 1}, each once")
    if missing := [byte for byte in range(BYTES) if bytes([byte]) not in ranks]:
        raise TextError(f"{path}: byte {missing[0]}: missing: every byte must be a token")
    return ranks
