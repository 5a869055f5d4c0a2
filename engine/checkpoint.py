"""Opening a Hugging Face folder of the Kimi-K2 family as it is released, for the engine to run or to import.

config.json, model.safetensors or shards with their index; bf16 or f32, experts and MLPs perhaps compressed-tensors
`pack-quantized` INT4. Only JSON and safetensors are read and nothing in the folder is executed. Every error is a
CheckpointError of one line, `<file>: <tensor or field>: <value>: <reason>`.
"""

import dataclasses
import json
import re
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np

from engine.manifest import GROUP_SIZES, check_tensor, is_finite, wanted_tensors
from engine.mapped import Entry, Fail, MappedFile, parse_json
from reference.config import FIXED, ModelConfig, short

MODEL_TYPES = ("deepseek_v3", "kimi_k2", "kimi_k25")
MAX_JSON_BYTES = 256 << 20
READ_AHEAD_BYTES = 256 << 20
SUFFIXES = {".weight_packed": ".qw", ".weight_scale": ".sc"}  # of an INT4 matrix: as released, in a bundle
PREFIX = "language_model."  # of the text part, where there is a vision part
OTHER_PARTS = ("vision_tower.", "mm_projector.", "multi_modal_projector.")  # this engine reads text only
CONFIG_NAMES = {*(field.name for field in dataclasses.fields(ModelConfig)), *FIXED, "num_key_value_heads",
                "rope_scaling", "rope_parameters"} - {"yarn"}  # fmt: skip


class CheckpointError(ValueError):
    """The folder is no checkpoint that the engine can run."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a tensor lies: its file, its name there and its entry in the file's header."""

    file: MappedFile
    name: str
    entry: Entry

    def fail(self, value: object, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.file.path}: {short(self.name)}: {short(value)}: {reason}")


class CheckpointTensor:
    """A tensor under the bundle's name, checked when it is loaded."""

    def __init__(self, source: Source, shape_source: Source | None, read_ahead: "ReadAhead"):
        self._source, self._shape_source, self._read_ahead = source, shape_source, read_ahead
        self.dtype, self.shape = source.entry.dtype, source.entry.shape

    @property
    def n_bytes(self) -> int:
        return self._source.entry.end - self._source.entry.begin

    @property
    def place(self) -> tuple[str, int]:
        """Its file, and where it begins there."""
        return self._source.file.path.name, self._source.entry.begin

    def load(self) -> np.ndarray:
        """The values; bf16 as uint16. Raises CheckpointError."""
        self._read_ahead.advance(self._source.entry)
        array = self._source.file.array(self._source.entry)
        if self._shape_source:
            packed = [self.shape[0], self.shape[1] * 8]
            told = self._shape_source.file.array(self._shape_source.entry).tolist()
            if told != packed:
                self._shape_source.fail(told, f"the packed tensor has {packed}")
        if not is_finite(array):
            self._source.fail("NaN or inf", "weights and scales must be finite")
        return array

    def release(self) -> None:
        self._source.file.forget(self._source.entry)


class ReadAhead:
    """Reads the tensors that come next, in the order in which the engine packs them, in a thread of its own."""

    def __init__(self):
        self._waiting: deque[Source] = deque()
        self._ahead = 0  # bytes asked for and not yet loaded
        self._reader = ThreadPoolExecutor(1, "read-ahead")

    def expect(self, sources: Iterable[Source]) -> None:
        self._waiting.extend(sources)

    def advance(self, loaded: Entry) -> None:
        self._ahead -= loaded.end - loaded.begin
        while self._waiting and self._ahead < READ_AHEAD_BYTES:
            source = self._waiting.popleft()
            self._reader.submit(source.file.fetch, source.entry)
            self._ahead += source.entry.end - source.entry.begin
        if not self._waiting:
            self._reader.shutdown(wait=False)  # its thread ends with what it was given


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open folder: a model in the bundle's names, exactly the tensors that its config asks for."""

    path: Path
    fields: dict  # what decides the model, as config.json spells it
    config: ModelConfig
    group_size: int  # of INT4 weights; 0 if there are none
    tensors: dict[str, CheckpointTensor]
    skipped: Counter  # kinds of tensors that are not the text model's, and how many

    @property
    def n_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())


def read_config(folder: str | Path) -> tuple[dict, ModelConfig, int]:
    """config.json -> (the text model's fields, its shape, group size of INT4 weights or 0)."""
    path = Path(folder) / "config.json"
    fail = _failing(path)
    config = read_json(path)
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        fail("text_config", text, "must be a map")
    for part in (config, text):
        if part.get("model_type") not in MODEL_TYPES:
            fail("model_type", part.get("model_type"), f"not one of {', '.join(MODEL_TYPES)}")
    try:
        shape = ModelConfig.from_dict(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    quantization = quantization_of(config)
    fields = {name: value for name, value in text.items() if name in _own_fields(config)}
    return fields, shape, _group_size(quantization, fail) if quantization else 0


def quantization_of(config: dict) -> object:
    """config.json's description of its quantised weights, if there is one."""
    return config.get("text_config", config).get("quantization_config") or config.get("quantization_config")


def open_checkpoint(folder: str | Path, layers: range | None = None) -> Checkpoint:
    """Maps the folder's shards and checks every name, shape and type; values are checked as they are loaded.

    `layers` makes a smaller model of some layers between embedding and head: only their tensors are read.
    """
    folder = Path(folder)
    fields, config, group_size = read_config(folder)
    sources, skipped = _collect(folder, config)
    if layers is not None:
        fields, config, sources = _only(layers, fields, config, sources, folder)
    wanted = wanted_tensors(config, group_size, sources, _failing(folder))
    for name in wanted:
        if name not in sources:
            _failing(folder)(_released_name(name), "missing", "the config asks for this tensor")
    read_ahead = ReadAhead()
    read_ahead.expect(sources[name] for name in wanted)
    tensors = {}
    for name, shape_and_dtypes in wanted.items():
        source = sources[name]
        check_tensor(source.entry, shape_and_dtypes, _failing(source.file.path), source.name)
        tensors[name] = CheckpointTensor(source, _shape_source(name, sources), read_ahead)
    for name, source in sources.items():
        if name not in wanted and not name.endswith(".weight_shape"):
            source.fail(list(source.entry.shape), "no tensor of this model")
    return Checkpoint(folder, fields, config, group_size, tensors, skipped)


def read_json(path: Path) -> dict:
    """A JSON object of the folder. Raises CheckpointError."""
    fail = _failing(path)
    try:
        if not path.is_file():
            fail("file", path.name, "missing")
        if path.stat().st_size > MAX_JSON_BYTES:
            fail("size", path.stat().st_size, f"more than {MAX_JSON_BYTES} bytes")
        return parse_json(path.read_bytes(), "file", fail)
    except OSError as error:
        fail("file", error.strerror, "cannot be read")


def _failing(path: Path) -> Fail:
    def fail(field, value, reason) -> NoReturn:
        raise CheckpointError(f"{path}: {short(field)}: {short(value)}: {reason}")

    return fail


def _own_fields(config: dict) -> set[str]:
    """The names of the fields that belong in a bundle: those that the exporter listed, or all that are read here."""
    listed = config.get("kdtree_fields")
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        return set(listed)
    return CONFIG_NAMES


def _group_size(quantization: object, fail: Fail) -> int:
    """The group size of a `pack-quantized` description; anything else is refused."""

    def require(holds, field, value, reason):
        if not holds:
            fail(f"quantization_config.{field}", value, reason)

    require(isinstance(quantization, dict), "", quantization, "must be a map")
    method, layout = quantization.get("quant_method"), quantization.get("format")
    reason = "FP8 blocks are not supported: use an INT4 release, or convert the weights to bf16"
    require(method != "fp8", "quant_method", method, reason)
    require(method == "compressed-tensors", "quant_method", method, "only compressed-tensors is supported")
    require(layout == "pack-quantized", "format", layout, "only pack-quantized is supported")
    require(quantization.get("kv_cache_scheme") is None, "kv_cache_scheme", quantization.get("kv_cache_scheme"),
            "a quantised KV cache is not supported")  # fmt: skip
    groups = quantization.get("config_groups")
    require(isinstance(groups, dict) and groups, "config_groups", groups, "must name at least one group")
    sizes = {}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        where = f"config_groups.{name}"
        require(isinstance(weights, dict), where, group, "has no weights")
        for field, value in {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}.items():
            require(weights.get(field) == value, f"{where}.weights.{field}", weights.get(field),
                    f"only {json.dumps(value)} is supported")  # fmt: skip
        require(not weights.get("actorder"), f"{where}.weights.actorder", weights.get("actorder"), "not supported")
        for field in ("input_activations", "output_activations"):
            require(group.get(field) is None, f"{where}.{field}", group.get(field), "only weights may be quantised")
        sizes[name] = weights.get("group_size")
        require(type(sizes[name]) is int and sizes[name] in GROUP_SIZES, f"{where}.weights.group_size", sizes[name],
                f"must be {', '.join(map(str, GROUP_SIZES))}")  # fmt: skip
    require(len(set(sizes.values())) == 1, "config_groups", sizes, "all groups must have one group_size")
    return next(iter(sizes.values()))


def _collect(folder: Path, config: ModelConfig) -> tuple[dict[str, Source], Counter]:
    """Every tensor of the text model by the bundle's name, and what is skipped."""
    sources, skipped = {}, Counter()
    for file, names in _shards(folder).items():
        for name in names or file.entries:
            source = Source(file, name, file.entries[name])
            own = name.removeprefix(PREFIX)
            if kind := _foreign(name, own, config):
                skipped[kind] += 1
                continue
            own = _bundle_name(own, source)
            if own in sources:
                source.fail(sources[own].file.path.name, "this tensor stands there too")
            sources[own] = source
    return sources, skipped


def _shards(folder: Path) -> dict[MappedFile, list[str]]:
    """Shards and the tensors that the index places there; without an index one file and no list: all it holds."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not whole.exists():
            _failing(folder)("model.safetensors", "missing", "there is no index of shards either; "
                             "only safetensors are read")  # fmt: skip
        return {MappedFile(whole, _failing(whole)): []}
    fail = _failing(index)
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        fail("weight_map", placed, "must place at least one tensor")
    by_file: dict[str, list[str]] = {}
    for name, file in placed.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w][\w.-]*\.safetensors", file, re.ASCII):
            fail(name, file, "must be the plain name of a safetensors file in this folder")
        by_file.setdefault(file, []).append(name)
    shards = {}
    for file, names in sorted(by_file.items()):
        if not (folder / file).exists():
            _failing(folder / file)(names[0], "missing", f"the index places {len(names)} tensors in this file")
        shard = MappedFile(folder / file, _failing(folder / file))
        for name in names:
            if name not in shard.entries:
                _failing(shard.path)(name, "missing", f"{index.name} places this tensor here")
        for name in shard.entries.keys() - set(names):
            _failing(shard.path)(name, placed.get(name), f"{index.name} does not place this tensor here")
        shards[shard] = names
    return shards


def _foreign(name: str, own: str, config: ModelConfig) -> str | None:
    """The kind of a tensor that is not the text model's."""
    if name.startswith(OTHER_PARTS):
        return name.split(".")[0]
    if own.endswith(".rotary_emb.inv_freq"):
        return "rotary_emb.inv_freq"
    if own.startswith(f"model.layers.{config.num_hidden_layers}."):  # multi-token prediction: right after the last
        return f"model.layers.{config.num_hidden_layers} (MTP)"
    return None


def _bundle_name(name: str, source: Source) -> str:
    for suffix, kind in ((".weight_scale_inv", "FP8 blocks are"), (".weight_zero_point", "a zero point is"),
                         (".weight_g_idx", "reordered columns are")):  # fmt: skip
        if name.endswith(suffix):
            source.fail(source.entry.dtype, f"{kind} not supported")
    for suffix, own in SUFFIXES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + own
    return name


def _released_name(name: str) -> str:
    for suffix, own in SUFFIXES.items():
        if name.endswith(own):
            return name.removesuffix(own) + suffix
    return name


def _shape_source(name: str, sources: dict[str, Source]) -> Source | None:
    """What tells the shape of packed codes, of two int32 or int64."""
    source = sources.get(name.removesuffix(".qw") + ".weight_shape") if name.endswith(".qw") else None
    if source and (source.entry.dtype not in ("I32", "I64") or source.entry.shape != (2,)):
        source.fail(f"{source.entry.dtype} {list(source.entry.shape)}", "must be two I32 or I64")
    return source


def _only(layers: range, fields: dict, config: ModelConfig, sources: dict[str, Source], folder: Path):
    """The model of `layers` alone, renumbered from 0."""
    fail = _failing(folder / "config.json")
    if not 0 <= layers.start < layers.stop <= config.num_hidden_layers or layers.step != 1:
        fail("layers", f"{layers.start}:{layers.stop}", f"must lie within 0:{config.num_hidden_layers}")
    if layers.start % config.moe_layer_freq:
        fail("layers", layers.start, f"must be a multiple of moe_layer_freq ({config.moe_layer_freq})")
    changes = {"num_hidden_layers": len(layers),
               "first_k_dense_replace": max(0, config.first_k_dense_replace - layers.start)}  # fmt: skip
    kept = {}
    for name, source in sources.items():
        if match := re.match(r"model\.layers\.(\d+)\.", name):
            if int(match[1]) not in layers:
                continue
            name = f"model.layers.{int(match[1]) - layers.start}.{name[match.end() :]}"
        kept[name] = source
    return fields | changes, dataclasses.replace(config, **changes), kept
