"""The operator contract, read from its C++ headers, so that a struct is written once.

`engine/ops/<op>/op.h` declares plain structs, one field a line; this module turns them into ctypes structures of the
same layout. It understands the headers' small dialect and nothing else: any other line is an error, because a field
that is skipped would shift every field behind it.
"""

import ctypes
import functools
import re
from dataclasses import dataclass
from pathlib import Path

OPS = Path(__file__).parent / "ops"

SCALARS = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}

_IGNORED = re.compile(
    r"|//.*|#pragma once|#include .*|namespace \w+ \{|\}  // namespace \w+|extern const Operator \w+;"
)
_CONSTANT = re.compile(r"constexpr int32_t (\w+) = (-?\d+);(?:\s*//.*)?")
_STRUCT = re.compile(r"struct (\w+) \{")
_FIELD = re.compile(r"(?P<const>const )?(?P<type>\w+)(?P<pointer>\*)? (?P<name>\w+);(?:\s*//\s*(?P<note>.*))?")


class ContractError(ValueError):
    """A header holds something that this module cannot read."""


@dataclass(frozen=True)
class Field:
    """One field of a struct. `type` is the C type; of a pointer, the type it points to."""

    name: str
    type: str
    pointer: bool
    const: bool  # of a pointer: the operator only reads what it points to
    note: str

    @property
    def ctype(self):
        return ctypes.c_void_p if self.pointer else SCALARS[self.type]


@dataclass(frozen=True)
class Struct:
    """One C struct: its fields and `ctype`, a ctypes.Structure of the same layout."""

    name: str
    fields: tuple[Field, ...]
    ctype: type[ctypes.Structure]

    def field(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(f"{self.name}: {name}: no such field")


@dataclass(frozen=True)
class Header:
    constants: dict[str, int]
    structs: dict[str, Struct]


@dataclass(frozen=True)
class Contract:
    """The three structs of an operator; `weights` is None for an operator without weights."""

    name: str
    shape: Struct
    weights: Struct | None
    args: Struct
    constants: dict[str, int]


def parse(text: str, source: str = "op.h") -> Header:
    """Reads the text of a header of plain structs and int32_t constants. Raises ContractError with file and line."""
    constants, structs = {}, {}
    name, fields = None, []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()

        def fail(reason, number=number, line=line):
            raise ContractError(f"{source}:{number}: {line}: {reason}")

        if name is None:
            if match := _STRUCT.fullmatch(line):
                name, fields = match[1], []
            elif match := _CONSTANT.fullmatch(line):
                constants[match[1]] = int(match[2])
            elif not _IGNORED.fullmatch(line):
                fail("neither a struct nor an int32_t constant")
        elif line == "};":
            if not fields:
                fail(f"struct {name} has no fields")
            ctype = type(name, (ctypes.Structure,), {"_fields_": [(f.name, f.ctype) for f in fields]})
            structs[name] = Struct(name, tuple(fields), ctype)
            name = None
        elif match := _FIELD.fullmatch(line):
            pointer = match["pointer"] is not None
            if not pointer and match["type"] not in SCALARS:
                fail(f"a field is one of {', '.join(SCALARS)} or a pointer")
            if not pointer and match["const"]:
                fail("only what a pointer points to can be const")
            if any(f.name == match["name"] for f in fields):
                fail("field declared twice")
            const = match["const"] is not None
            fields.append(Field(match["name"], match["type"], pointer, const, match["note"] or ""))
        elif line and not line.startswith("//"):
            fail("not a field of the form `[const] type[*] name;`")
    if name is not None:
        raise ContractError(f"{source}: struct {name} does not end")
    return Header(constants, structs)


def read(path: Path) -> Header:
    """The header at `path`, inside engine/."""
    return parse(path.read_text(encoding="utf-8"), str(path.relative_to(OPS.parent.parent)))


@functools.cache
def element_types() -> dict[str, int]:
    """The element types of operator.h by their names there: kFloat32, kBFloat16."""
    text = (OPS / "operator.h").read_text(encoding="utf-8")
    return {match[1]: int(match[2]) for match in _CONSTANT.finditer(text)}


@functools.cache
def decode_state() -> Header:
    """decode_state.h: the struct DecodeState and the reasons why decoding ended."""
    return read(OPS / "decode_state.h")


def operator_names() -> list[str]:
    """Names of all operators, sorted."""
    return sorted(path.parent.name for path in OPS.glob("*/op.h"))


@functools.cache
def contract(name: str) -> Contract:
    """The contract of operator `name`. Raises ContractError if its header lacks a struct or holds another."""
    path = OPS / name / "op.h"
    if not path.is_file():
        raise ContractError(f"{name}: no such operator (there are {', '.join(operator_names())})")
    header = read(path)
    stem = "".join(part.capitalize() for part in name.split("_"))
    structs = dict(header.structs)
    shape, weights, args = (structs.pop(stem + kind, None) for kind in ("Shape", "Weights", "Args"))
    if shape is None or args is None:
        raise ContractError(f"{path}: lacks struct {stem}Shape or {stem}Args")
    if structs:
        raise ContractError(f"{path}: {', '.join(structs)}: not one of {stem}Shape, {stem}Weights, {stem}Args")
    if pointer := [field.name for field in shape.fields if field.pointer]:
        raise ContractError(f"{path}: {stem}Shape: {pointer[0]}: a shape is passed by value")
    return Contract(name, shape, weights, args, header.constants)
