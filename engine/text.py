"""Text in and out of a model: prompts as tokens, and the text of tokens as they come."""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.chat_template import ChatTemplate, open_chat_template
from engine.tokenizer import BYTES, TOKENIZERS, Tokenizer, byte_tokenizer, open_tokenizer, stop_tokens
from reference.config import short


class UsageError(ValueError):
    """An argument that cannot be used: `<argument>: <value>: <reason>`."""


@dataclass(frozen=True)
class Text:
    """How a model and its user talk: tokenizer and chat template, where the model has them, and what ends a text."""

    vocab_size: int
    tokenizer: Tokenizer | None
    template: ChatTemplate | None = None
    stop_token_ids: Sequence[int] = ()

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a plain prompt; token ids pass as they are. Raises UsageError."""
        tokens = self._encode_text(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not tokens:
            raise UsageError("prompt: empty: needs at least one token")
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise UsageError(f"prompt: {token}: outside the vocabulary of {self.vocab_size}")
        return tokens

    def _encode_text(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise UsageError(f"prompt: {short(prompt)}: this model has no tokenizer: give token ids")
        tokens = self.tokenizer.encode(prompt)
        if tokens and all(token in self.tokenizer.special for token in tokens):
            raise UsageError(f"prompt: {short(prompt)}: special tokens only: there is no text to go on from")
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, object]], **variables) -> list[int]:
        """The tokens of a conversation, ready for the answer. Raises UsageError, or TextError from the template."""
        if self.template is None or self.tokenizer is None:
            raise UsageError("messages: no chat template: this model has none; give a plain prompt")
        return self.encode(self.tokenizer.encoder(self.template.render(messages, **variables)))


def byte_text(vocab_size: int) -> Text:
    """Of generated models: a text is its UTF-8 bytes as tokens, for which the vocabulary must have room."""
    return Text(vocab_size, byte_tokenizer() if vocab_size >= BYTES else None)


def open_text(folder: str | Path, vocab_size: int) -> Text:
    """A checkpoint's. Without a tokenizer prompts are token ids."""
    has_tokenizer = any((Path(folder) / name).is_file() for name in TOKENIZERS)
    tokenizer = open_tokenizer(folder, vocab_size) if has_tokenizer else None
    stop = [token for token in stop_tokens(folder, tokenizer) if 0 <= token < vocab_size]
    return Text(vocab_size, tokenizer, open_chat_template(folder), stop)


class TextStream:
    """Text out of tokens, one at a time: whole characters only; nothing from a stop string on, nor what may yet become
    one. `stopped` is the stop string that was met."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()):
        """Without a tokenizer every token is U+FFFD."""
        self._bytes_of = tokenizer.bytes_of if tokenizer else lambda token: "\ufffd".encode()
        self._stop = [text for text in stop if text]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped: str | None = None

    def feed(self, token: int) -> str:
        """The text that is certain after this token."""
        piece = self._bytes_of(token)
        # A special token ends an unfinished character.
        return self._pass(self._decoder.decode(b"", final=True) if piece is None else self._decoder.decode(piece))

    def finish(self) -> str:
        """What is left when no token follows."""
        rest = self._pass(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return rest

    def _pass(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + text
        met = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if met:
            at, self.stopped = min(met)
            self._held = ""
            return text[:at]
        hold = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
