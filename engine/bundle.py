"""Opening a bundle for the engine: memory-mapped, checked against its config before anything is built from it.

Every error is a BundleError of one line, `<file>: <field>: <value>: <reason>`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from engine.manifest import GROUP_SIZES, check_tensor, is_finite, wanted_tensors
from engine.mapped import Fail, MappedFile, parse_json
from reference.bundle import FORMAT
from reference.config import ModelConfig, short


class BundleError(ValueError):
    """The file is no bundle that the engine can run."""


@dataclass(frozen=True)
class TensorView:
    """One tensor of the mapped file; bf16 as uint16."""

    dtype: str
    array: np.ndarray
    file: MappedFile | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def load(self) -> np.ndarray:
        if self.file:
            self.file.check_size()
        return self.array

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class OpenBundle:
    """A checked bundle: exactly the tensors that its config asks for, in the file's order."""

    path: Path
    fields: dict  # the config as it is spelt
    config: ModelConfig
    group_size: int  # of INT4 weights; 0 if there are none
    tensors: dict[str, TensorView]

    @property
    def n_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.array.nbytes for tensor in self.tensors.values())


def open_bundle(path: str | Path) -> OpenBundle:
    """Maps the file and checks header, config, and every tensor's name, shape, type and values."""
    path = Path(path)

    def fail(field, value, reason) -> NoReturn:
        raise BundleError(f"{path}: {short(field)}: {short(value)}: {reason}")

    file = MappedFile(path, fail)
    if file.metadata.get("format") != FORMAT:
        fail("format", file.metadata.get("format"), f"not {FORMAT}")
    fields, config, group_size = _read_config(path, file.metadata, fail)
    wanted = wanted_tensors(config, group_size, file.entries, fail)
    for name in wanted:
        if name not in file.entries:
            fail(name, "missing", "the config asks for this tensor")
    tensors = {}
    for name, entry in file.entries.items():
        if name not in wanted:
            fail(name, list(entry.shape), "no tensor of this model")
        check_tensor(entry, wanted[name], fail, name)
        tensors[name] = TensorView(entry.dtype, file.array(entry), file)
        if not is_finite(tensors[name].array):
            fail(name, "NaN or inf", "weights and scales must be finite")
    return OpenBundle(path, fields, config, group_size, tensors)


def _read_config(path: Path, metadata: dict, fail: Fail) -> tuple[dict, ModelConfig, int]:
    for name in ("config", "quant"):
        if not isinstance(metadata.get(name), str):
            fail(name, metadata.get(name), "missing from the metadata")
    fields = parse_json(metadata["config"], "config", fail)
    try:
        config = ModelConfig.from_dict(fields)
    except ValueError as error:
        raise BundleError(f"{path}: {error}") from None
    if metadata["quant"] == "null":
        return fields, config, 0
    quant = parse_json(metadata["quant"], "quant", fail)
    wanted = [{"bits": 4, "group_size": size} for size in GROUP_SIZES]
    if quant not in wanted or not isinstance(quant["group_size"], int):
        fail("quant", quant, f"only 4 bits in groups of {', '.join(map(str, GROUP_SIZES))}")
    return fields, config, quant["group_size"]
