"""The engine of a backend's library, called through its C interface (engine/core/api.h)."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engine import contract
from reference.config import ModelConfig, short
from reference.rope import attention_factor

CORE = contract.parse((Path(__file__).parent / "core" / "config.h").read_text(encoding="utf-8"), "core/config.h")
TYPES = {"F32": contract.element_types()["kFloat32"], "BF16": contract.element_types()["kBFloat16"],
         "I32": CORE.constants["kInt32"]}
ACTIVATIONS = {"float32": TYPES["F32"], "bfloat16": TYPES["BF16"]}
DRAFTERS = {name: contract.contract("draft_script").constants[f"k{name.capitalize()}"]
            for name in ("oracle", "noisy", "adversarial")}
MODES = {"ar": CORE.constants["kAutoregressive"], "ddtree": CORE.constants["kDdtree"]}
STOP_REASONS = {contract.decode_state().constants["kStopToken"]: "stop",
                contract.decode_state().constants["kTokenLimit"]: "length",
                CORE.constants["kContextLimit"]: "context",
                CORE.constants["kCancelled"]: "cancelled"}

_Config, _Options, _Tensor, _Request, _Result, _Round = (
    CORE.structs[name].ctype for name in ("ModelConfig", "EngineOptions", "Tensor", "Request", "Result", "Round"))
_OnRound = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(_Round))
_OnTensor = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)


class EngineError(RuntimeError):
    """The engine's own one-line error."""


class BackendError(EngineError):
    """The backend cannot run on this machine, whatever the model."""


@dataclass(frozen=True)
class Drafter:
    """draft_script's parameters; see engine/ops/draft_script/op.h."""

    kind: str = "oracle"
    p: float = 0.0
    seed: int = 0


ORACLE = Drafter()


@dataclass(frozen=True)
class Round:
    """One round. `logits` [accepted, vocab] float32 and `kv` [layers, accepted, width] (bf16 as uint16) if recorded."""

    n_rows: int
    accepted: int
    tokens: list[int]
    overrun: bool
    logits: np.ndarray | None
    kv: np.ndarray | None


@dataclass(frozen=True)
class Result:
    """`committed` counts before the cut by stop token and limit, the first token included; `steps` does not count the
    round that yields the first token."""

    tokens: list[int]
    committed: int
    steps: int
    stop_reason: str


class Model(Protocol):
    """What the engine is built from: an OpenBundle, an open checkpoint, generated weights."""

    config: ModelConfig
    group_size: int  # of INT4 weights; 0 if there are none
    tensors: Mapping[str, "HostTensor"]  # by the bundle's names


class HostTensor(Protocol):
    """One tensor of a model, read only when the engine packs it."""

    dtype: str  # F32, BF16 or I32
    shape: tuple[int, ...]

    def load(self) -> np.ndarray:
        """The values, checked; bf16 as uint16."""

    def release(self) -> None:
        """The engine has read them."""


class Engine:
    """One model on one backend, for one sequence at a time. Use as a context manager, or call close()."""

    def __init__(self, library: str | Path, model: Model, *, context: int, block_size: int = 8,
                 tree_budget: int = 16, prefill_chunk: int = 64, activations: str = "float32",
                 drafter: Drafter = ORACLE, on_loaded: Callable[[int], None] | None = None):
        """`context`: most positions of a sequence. `on_loaded` is told the bytes of every tensor packed. Raises
        BackendError, EngineError naming operator or tensor and the reason, and whatever reading a tensor raises."""
        self._handle = None
        self.config, self.activations = model.config, activations
        self._c = _open_library(library)
        for name, result, *arguments in (
            ("error", ctypes.c_char_p),
            ("backend", ctypes.c_char_p),
            ("variant", ctypes.c_char_p),
            ("init", ctypes.c_int),
            ("create", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, _OnTensor,
             ctypes.c_void_p),
            ("destroy", None, ctypes.c_void_p),
            ("generate", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, _OnRound, ctypes.c_void_p, ctypes.c_void_p),
            ("read_kv", ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
            ("called_operators", ctypes.c_char_p, ctypes.c_void_p),
        ):
            function = getattr(self._c, f"kdtree_{name}")
            function.restype, function.argtypes = result, arguments
        try:
            self._call(self._c.kdtree_init)
        except EngineError as error:
            raise BackendError(error) from None
        self.backend, self.variant = self._c.kdtree_backend().decode(), self._c.kdtree_variant().decode()
        options = _filled(_Options, context=context, block_size=block_size, tree_budget=tree_budget,
                          prefill_chunk=prefill_chunk, activations=ACTIVATIONS[activations],
                          drafter=DRAFTERS[drafter.kind], drafter_p=drafter.p, drafter_seed=drafter.seed)
        self._handle = self._build(model, options, on_loaded)

    def _build(self, model, options, on_loaded):
        sources = list(model.tensors.values())
        names = [name.encode() for name in model.tensors]  # kept alive until the engine is built
        tensors = (_Tensor * len(names))(*map(_describe, names, sources))
        arrays, raised = {}, []

        @_OnTensor
        def receive(_, index, done):
            try:
                if not done:
                    arrays[index] = sources[index].load()
                    tensors[index].data = arrays[index].ctypes.data
                elif index in arrays:
                    size = arrays.pop(index).nbytes
                    sources[index].release()
                    if on_loaded:
                        on_loaded(size)
            except BaseException as error:  # must not cross the C frames
                raised.append(error)
                return 1
            return 0

        config = native_config(model)
        handle = self._c.kdtree_create(ctypes.byref(config), ctypes.byref(options), tensors, len(names), receive, None)
        if raised:
            self._c.kdtree_destroy(handle)
            raise raised[0]
        if not handle:
            raise EngineError(self._c.kdtree_error().decode())
        return handle

    def close(self) -> None:
        """Frees the engine's memory."""
        if self._handle:
            self._c.kdtree_destroy(self._handle)
            self._handle = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _call(self, function, *arguments):
        if function(*arguments):
            raise EngineError(self._c.kdtree_error().decode())

    @property
    def called_operators(self) -> list[str]:
        """The operators called so far."""
        return self._c.kdtree_called_operators(self._handle).decode().split()

    def generate(self, prompt: list[int], *, mode: str, max_new_tokens: int, stop_token_ids: list[int] = (),
                 script: list[int] = (), kept: int = 0, record: bool = False, overrun: int = 0,
                 on_round: Callable[[Round], bool] | None = None) -> Result:
        """Decodes after `prompt`.

        `script` is the sequence (prompt and continuation) that draft_script drafts from. The first `kept` tokens of the
        prompt must be those of the last run's sequence: their KV rows are used as they are. With `record` every Round
        carries its logits and KV rows. `overrun` rounds go on past the end of the output, for records. `on_round` sees
        every round as it ends; a true answer ends the run. Raises EngineError.
        """
        request = _filled(_Request, mode=MODES[mode], prompt_length=len(prompt), kept=kept, record=record,
                          max_new_tokens=max_new_tokens, n_stop_ids=len(stop_token_ids), script_length=len(script),
                          overrun=overrun)
        arrays = {name: _token_array(name, values) for name, values in
                  (("prompt", prompt), ("stop_ids", stop_token_ids), ("script", script))}
        for name, array in arrays.items():
            setattr(request, name, array.ctypes.data)
        tokens, raised = [], []

        @_OnRound
        def receive(_, pointer):
            try:
                round_ = self._read_round(pointer.contents)
                if not round_.overrun:
                    tokens.extend(round_.tokens)
                return bool(on_round and on_round(round_))
            except BaseException as error:  # must not cross the C frames
                raised.append(error)
                return 1

        result = _Result()
        status = self._c.kdtree_generate(self._handle, ctypes.byref(request), receive, None, ctypes.byref(result))
        if raised:
            raise raised[0]
        if status:
            raise EngineError(self._c.kdtree_error().decode())
        return Result(tokens, result.committed, result.steps, STOP_REASONS[result.stop_reason])

    def omp_set_num_threads(self, count: int) -> None:
        """OpenMP threads of a CPU library, from here on."""
        self._c.omp_set_num_threads(count)

    def read_kv(self, count: int) -> np.ndarray:
        """The first `count` committed rows of the KV pool: [layers, count, kv_lora_rank + rope], bf16 as uint16."""
        kv = np.empty((self.config.num_hidden_layers, count, self.config.kv_width), self._kv_dtype)
        self._call(self._c.kdtree_read_kv, self._handle, 0, count, kv.ctypes.data)
        return kv

    @property
    def _kv_dtype(self):
        return np.uint16 if self.activations == "bfloat16" else np.float32

    def _read_round(self, c) -> Round:
        def copy(pointer, shape, dtype):
            if not pointer:
                return None
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return np.frombuffer(ctypes.string_at(pointer, size), dtype).reshape(shape)

        tokens = copy(c.tokens, (c.n_tokens,), np.int32).tolist()
        return Round(c.n_rows, c.accepted, tokens, bool(c.overrun),
                     copy(c.logits, (c.accepted, self.config.vocab_size), np.float32),
                     copy(c.kv, (self.config.num_hidden_layers, c.accepted, self.config.kv_width), self._kv_dtype))


def native_config(model: Model):
    """The model's config as the core's ModelConfig."""
    config, yarn = model.config, model.config.yarn
    rope = {"rope_factor": yarn.factor if yarn else 1.0,
            "rope_beta_fast": yarn.beta_fast if yarn else 0.0,
            "rope_beta_slow": yarn.beta_slow if yarn else 0.0,
            "rope_attention_factor": attention_factor(yarn),
            "rope_mscale_all_dim": yarn.mscale_all_dim if yarn else 0.0,
            "rope_original_positions": yarn.original_max_position_embeddings if yarn else 0}
    own = {"group_size": model.group_size, "q_lora_rank": config.q_lora_rank or 0, **rope}
    shared = {field.name: getattr(config, field.name) for field in CORE.structs["ModelConfig"].fields
              if field.name not in own}
    return _filled(_Config, **own, **shared)


def runs_here(library: str | Path) -> bool:
    """Whether this machine has what the library's backend needs."""
    return not _open_library(library).kdtree_init()


def _open_library(path: str | Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(Path(path).resolve()))
    except OSError as error:
        raise BackendError(f"library: {path}: {short(error)}") from None
    if not hasattr(library, "kdtree_create"):
        raise BackendError(f"library: {path}: not a library of the engine")
    return library


def _filled(struct: type[ctypes.Structure], **values) -> ctypes.Structure:
    """The struct; ctypes would keep the low bits of an integer that does not fit its field."""
    made = struct(**values)
    for name, value in values.items():
        if isinstance(value, int) and getattr(made, name) != value:
            raise EngineError(f"{name}: {value}: does not fit {8 * getattr(struct, name).size} bits")
    return made


def _token_array(what: str, tokens: list[int]) -> np.ndarray:
    try:
        return np.asarray(tokens, np.int32)
    except OverflowError:
        worst = max(tokens, key=abs)
        raise EngineError(f"{what}: {worst}: outside every vocabulary") from None


def _describe(name: bytes, tensor: HostTensor):
    rows, cols = (*tensor.shape, 1)[:2]
    return _Tensor(name=ctypes.cast(name, ctypes.c_void_p), type=TYPES[tensor.dtype], rank=len(tensor.shape), rows=rows,
                   cols=cols)
