"""The engine as a library: `engine.Engine` opens a bundle or a released checkpoint and generates text.

with engine.Engine("path/to/checkpoint") as model:
    for piece in model.stream("Once upon a time", max_new_tokens=64):
        print(piece.text, end="", flush=True)
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from engine import native
from engine.bundle import OpenBundle, open_bundle
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.text import Text, TextStream, UsageError, byte_text, open_text

Mode = Literal["ar", "ddtree"]
Messages = Sequence[Mapping[str, object]]  # of a conversation: maps with `role` and `content`
Prompt = str | Sequence[int]

BUILD = Path(__file__).resolve().parent.parent / "results" / "build"
DEFAULT_CONTEXT = 8192


@dataclasses.dataclass(frozen=True)
class Stats:
    """`steps`, `committed` and `avg_accept` as in the verdicts; seconds by the wall clock."""

    prompt_tokens: int
    kept_tokens: int  # of the prompt: their KV rows were those of an earlier call
    steps: int
    committed: int
    avg_accept: float
    first_token_seconds: float  # prefill and the first round
    tokens_per_second: float  # of the rounds after it; 0 if there were none


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one round adds. `text` may lag behind `tokens`: only whole characters that no stop string can take back."""

    text: str
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Generation:
    """`stop_reason`: stop (a stop token, kept as the last of `tokens`), stop_string, length, context or cancelled.
    `tokens` end with the one that completed a stop string; `text` ends before the string."""

    text: str
    tokens: list[int]
    stop_reason: str
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Progress:
    """Loading: bytes of weights packed so far, of all, and seconds since the start."""

    loaded: int
    total: int
    seconds: float


def find_library(device: str) -> Path:
    """The library that the ladder built for `device`; auto prefers CUDA where it was built and there is a GPU."""
    for backend in ("cuda", "cpu") if device == "auto" else (device,):
        library = BUILD / backend / f"libkdtree_{backend}.so"
        if library.exists() and (device != "auto" or native.runs_here(library)):
            return library
    raise UsageError(f"device: {device}: no library under results/build; build it with the ladder first")


def open_model(path: str | Path, layers: range | None = None) -> OpenBundle | Checkpoint:
    """A folder is a checkpoint, a file is a bundle. `layers`: only those of a checkpoint."""
    if Path(path).is_dir():
        return open_checkpoint(path, layers)
    if layers is not None:
        raise UsageError(f"layers: {layers.start}:{layers.stop}: only a checkpoint can be opened in part")
    return open_bundle(path)


def text_of(model: OpenBundle | Checkpoint) -> Text:
    """Tokens of a bundle are bytes, those of a checkpoint what its folder says."""
    vocab_size = model.config.vocab_size
    return byte_text(vocab_size) if isinstance(model, OpenBundle) else open_text(model.path, vocab_size)


class Engine:
    """A model ready to generate, for one sequence at a time; close() or the end of `with` frees its memory.

    The KV rows of the last sequence stay: a prompt that begins as it did (the next turn of a conversation) is prefilled
    only from where the two part.
    """

    def __init__(
        self,
        model: str | Path | OpenBundle | Checkpoint,
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        library: str | Path | None = None,
        activations: Literal["float32", "bfloat16"] = "float32",
        context: int | None = None,
        layers: range | None = None,
        block_size: int = 8,
        tree_budget: int = 16,
        drafter: native.Drafter = native.ORACLE,
        on_progress: Callable[[Progress], None] | None = None,
    ):
        """`context`: most tokens of prompt and output together (default: 8192, or the model's own if that is smaller).

        Raises UsageError, BundleError, CheckpointError, TextError or EngineError, each with one line.
        """
        self.model = model if isinstance(model, OpenBundle | Checkpoint) else open_model(model, layers)
        self.config = self.model.config
        self.text = text_of(self.model)
        most = self.config.max_position_embeddings
        self.context = context or min(DEFAULT_CONTEXT, most)
        if not 2 <= self.context <= most:
            raise UsageError(f"context: {context}: must lie in 2…max_position_embeddings ({most})")
        self.block_size = block_size
        self._sequence: list[int] = []  # whose KV rows the engine holds
        self._native = native.Engine(
            library or find_library(device),
            self.model,
            context=self.context,
            block_size=block_size,
            tree_budget=tree_budget,
            activations=activations,
            drafter=drafter,
            on_loaded=_progress(self.model, on_progress) if on_progress else None,
        )
        self.backend, self.activations = self._native.backend, activations

    def close(self) -> None:
        """Frees weights and KV pool."""
        self._native.close()
        self._sequence = []

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def encode_chat(self, messages: Messages, **variables) -> list[int]:
        """The prompt of a conversation by the model's chat template, to which `variables` go as they are."""
        return self.text.encode_chat(messages, **variables)

    def generate(self, prompt: Prompt, **options) -> Generation:
        """The whole output. Options as in stream()."""
        return self._generate(self.text.encode(prompt), lambda piece: False, **options)

    def stream(self, prompt: Prompt, **options) -> "Stream":
        """The output piece by piece, as rounds end. Options:

        mode: "ar" or "ddtree". The scripted drafters draft from what plain decoding yields, so "ddtree" decodes
            plainly first and shows exactness and acceptance, not speed.
        max_new_tokens: most tokens to generate (256).
        stop_token_ids: what ends the output; default: every end-of-text id that the checkpoint names.
        stop: strings that end the output, wherever in an accepted path they end.
        reuse_kv: False to prefill the whole prompt.
        """
        return Stream(self, self.text.encode(prompt), options)

    def _generate(
        self,
        prompt: list[int],
        emit: Callable[[Piece], bool],
        *,
        mode: Mode = "ar",
        max_new_tokens: int = 256,
        stop_token_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        reuse_kv: bool = True,
    ) -> Generation:
        """`emit` sees every piece; a true answer ends the output."""
        if len(prompt) >= self.context:
            raise UsageError(f"prompt: {len(prompt)} tokens: the context holds {self.context}")
        if stop and self.text.tokenizer is None:
            raise UsageError(f"stop: {list(stop)}: this model has no tokenizer")
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens: {max_new_tokens}: must be at least 1")
        if stop_token_ids is None:
            stop_token_ids = self.text.stop_token_ids
        if not reuse_kv:
            self._sequence = []
        options = {"max_new_tokens": max_new_tokens, "stop_token_ids": list(stop_token_ids)}
        script = self._script(prompt, options) if mode == "ddtree" else []
        stream = TextStream(self.text.tokenizer, stop)
        tokens, text, times = [], [], []

        def on_round(round_: native.Round) -> bool:
            times.append(time.perf_counter())
            new, pieces = [], []
            for token in round_.tokens:
                new.append(token)
                pieces.append(stream.feed(token))
                if stream.stopped is not None:
                    break
            tokens.extend(new)
            text.append("".join(pieces))
            return emit(Piece(text[-1], new)) or stream.stopped is not None

        begin = time.perf_counter()
        kept, result = self._run(prompt, mode=mode, script=script, on_round=on_round, **options)
        if rest := stream.finish():
            text.append(rest)
            emit(Piece(rest, []))
        first, last = times[0], times[-1]
        stats = Stats(
            prompt_tokens=len(prompt),
            kept_tokens=kept,
            steps=result.steps,
            committed=result.committed,
            avg_accept=(result.committed - 1) / result.steps if result.steps else 0.0,
            first_token_seconds=first - begin,
            tokens_per_second=(len(tokens) - 1) / (last - first) if last > first else 0.0,
        )
        reason = result.stop_reason if stream.stopped is None else "stop_string"
        return Generation("".join(text), tokens, reason, stats)

    def _script(self, prompt: list[int], options: dict) -> list[int]:
        """Prompt and plain continuation, a block past the end, for the drafters that draft from it."""
        rounds = []
        _, plain = self._run(prompt, mode="ar", overrun=self.block_size, on_round=rounds.append, **options)
        return [*prompt, *plain.tokens, *(token for round_ in rounds if round_.overrun for token in round_.tokens)]

    def _run(self, prompt: list[int], **options) -> tuple[int, native.Result]:
        """One native run from the longest common prefix on: (its length, result)."""
        kept = 0
        for held, token in zip(self._sequence, prompt[:-1], strict=False):
            if held != token:
                break
            kept += 1
        self._sequence = []  # a run that fails leaves its rows in doubt
        result = self._native.generate(prompt, kept=kept, **options)
        self._sequence = [*prompt, *result.tokens][:-1]  # the last token has not been forwarded
        return kept, result


class Stream(Iterator[Piece]):
    """Pieces of an output as they come; `result` holds the whole once they are through. close(), or leaving `with`,
    ends the output early."""

    def __init__(self, engine: Engine, prompt: list[int], options: dict):
        self.result: Generation | None = None
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._cancelled, self._error = threading.Event(), None

        def emit(piece: Piece) -> bool:
            self._pieces.put(piece)
            return self._cancelled.is_set()

        def work():
            try:
                self.result = engine._generate(prompt, emit, **options)
            except BaseException as error:  # raised where the pieces are awaited
                self._error = error
            self._pieces.put(None)

        self._worker = threading.Thread(target=work, name="kdtree stream", daemon=True)
        self._worker.start()

    def __next__(self) -> Piece:
        piece = self._pieces.get() if self._worker else None
        if piece is None:
            self.close()
            if self._error:
                error, self._error = self._error, None
                raise error
            raise StopIteration
        return piece

    def close(self) -> None:
        """Ends the output after the round under way."""
        self._cancelled.set()
        if self._worker:
            self._worker.join()
            self._worker = None

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Conversation:
    """Turns with one model by its chat template; each turn prefills only what is new."""

    def __init__(self, engine: Engine, system: str | None = None, **variables):
        """`variables` go to the template as they are."""
        self.engine = engine
        self.messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
        self._variables = variables

    def ask(self, content: str, **options) -> Generation:
        """Adds a user's message and the answer to it. Options as in Engine.stream()."""
        messages = [*self.messages, {"role": "user", "content": content}]
        answer = self.engine.generate(self.engine.encode_chat(messages, **self._variables), **options)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def _progress(model: OpenBundle | Checkpoint, report: Callable[[Progress], None]) -> Callable[[int], None]:
    total, loaded, begin = model.n_bytes, 0, time.perf_counter()

    def on_loaded(n_bytes: int) -> None:
        nonlocal loaded
        loaded += n_bytes
        report(Progress(loaded, total, time.perf_counter() - begin))

    return on_loaded
