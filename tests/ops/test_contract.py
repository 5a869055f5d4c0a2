"""The reader of op.h: every operator's header as it stands, and loud errors for what it cannot read."""

import ctypes

import pytest

from engine import contract
from engine.contract import ContractError, parse

HEADER = """\
// A comment.
#pragma once
#include "../operator.h"

namespace kdtree {

constexpr int32_t kPlain = 0;  // trailing
constexpr int32_t kOther = -3;

struct FooShape {
  // A comment line.
  int32_t rows;   // and a trailing one
  int64_t seed;
  float eps;
  double scale;
};

struct FooArgs {
  const int32_t* n_rows;
  const void* x;  // null = 0
  float* y;
};

extern const Operator foo;

}  // namespace kdtree
"""


def test_reads_structs_and_constants():
    header = parse(HEADER)
    assert header.constants == {"kPlain": 0, "kOther": -3}
    shape, args = header.structs["FooShape"], header.structs["FooArgs"]
    assert [(f.name, f.ctype) for f in shape.fields] == [
        ("rows", ctypes.c_int32),
        ("seed", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_double),
    ]
    assert ctypes.sizeof(shape.ctype) == 32  # 4, padding 4, 8, 4, padding 4, 8: as the compiler lays it out
    assert [(f.type, f.pointer, f.const) for f in args.fields] == [
        ("int32_t", True, True),
        ("void", True, True),
        ("float", True, False),
    ]
    assert args.field("x").note == "null = 0"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("int64_t seed;", "uint8_t seed;", "op.h:13: uint8_t seed;: a field is one of"),
        ("int64_t seed;", "int64_t seed", "op.h:13: int64_t seed: not a field"),
        ("int64_t seed;", "int64_t a, b;", "op.h:13: .*not a field"),
        ("int64_t seed;", "int64_t seed[4];", "op.h:13: .*not a field"),
        ("int64_t seed;", "int64_t seed = 1;", "op.h:13: .*not a field"),
        ("int64_t seed;", "int32_t rows;", "op.h:13: int32_t rows;: field declared twice"),
        ("float* y;", "float** y;", "op.h:21: .*not a field"),
        ("const int32_t* n_rows;", "const int32_t n_rows;", "op.h:19: .*only what a pointer points to"),
        ("constexpr int32_t kPlain = 0;", "constexpr float kPlain = 0;", "op.h:7: .*neither a struct nor"),
        ("}  // namespace kdtree", "struct Bar {", "op.h: struct Bar does not end"),
    ],
)
def test_refuses_what_it_cannot_read(old, new, message):
    assert HEADER.count(old) == 1
    with pytest.raises(ContractError, match=message):
        parse(HEADER.replace(old, new))


@pytest.mark.parametrize("name", contract.operator_names())
def test_every_operator_has_a_contract(name):
    it = contract.contract(name)
    assert all(not field.pointer for field in it.shape.fields)
    written = [field.name for field in it.args.fields if field.pointer and not field.const]
    assert written, "an operator that writes nothing"
    assert ("packed" in [field.name for field in it.args.fields]) == (it.weights is not None)


def test_layout_is_the_compilers(tmp_path):
    """sizeof and offsetof of every struct, as g++ sees them, against ctypes."""
    import subprocess

    names = contract.operator_names()
    source, expected = ["#include <cstddef>", "#include <cstdio>"], []
    source += [f'#include "{contract.OPS}/{name}/op.h"' for name in names]
    source += ["using namespace kdtree;", "int main() {"]
    structs = [s for n in names for s in (lambda c: (c.shape, c.weights, c.args))(contract.contract(n)) if s]
    for struct in [*structs, contract.decode_state().structs["DecodeState"]]:
        source.append(f'  std::printf("%zu\\n", sizeof({struct.name}));')
        expected.append(ctypes.sizeof(struct.ctype))
        for field in struct.fields:
            source.append(f'  std::printf("%zu\\n", offsetof({struct.name}, {field.name}));')
            expected.append(getattr(struct.ctype, field.name).offset)
    (tmp_path / "layout.cpp").write_text("\n".join([*source, "}"]))
    subprocess.run(["g++", "-std=c++17", "layout.cpp", "-o", "layout"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    assert [int(line) for line in printed.split()] == expected


def test_names_an_unknown_operator():
    with pytest.raises(ContractError, match="no_such: no such operator"):
        contract.contract("no_such")
