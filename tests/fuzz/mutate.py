"""Mutations that know the format: one part of a bundle or of a config, set to something else."""

import copy
import json
import random

from reference.config import ModelConfig
from tests.fuzz.models import File, parse_file

INTEGERS = (-(2**63), -(2**31) - 1, -(2**31), -7, -1, 0, 1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 63, 64, 65, 1000, 2**15,
            2**16, 2**20, 2**20 + 1, 10**9, 2**30, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63, 10**30)  # fmt: skip
REALS = (-1.0, -0.0, 0.0, 5e-324, 1e-45, 1e-38, 0.5, 1.0, 1.5, 3e38, 1e39, 1.7e308, float("inf"), float("nan"))
OTHERS = (None, True, False, "", "yarn", "linear", "a\nb", "\udc80\x1b[31m", "x" * 500, [], [1], {}, {"a": 1}, [[[]]])
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I8", "BOOL", "F8_E4M3", "f32", "", "?", 7, None, ["F32"])


def any_value(rng: random.Random):
    return rng.choice(rng.choice((INTEGERS, INTEGERS, REALS, OTHERS)))


def near(rng: random.Random, value: int) -> int:
    """An integer that a slip of the pen makes of `value`."""
    return rng.choice((value - 1, value + 1, 2 * value, value // 2, -value, value ^ (1 << rng.randrange(40))))


# ---- JSON


def mutate_json(rng: random.Random, value):
    """`value` with one place in it changed, removed, repeated or added. Does not touch `value`."""
    value = copy.deepcopy(value)
    holder, key = _place(rng, value)
    if holder is None:
        return any_value(rng)
    how = rng.randrange(5)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[rng.choice(("extra", "", "rope_type", "text_config", "quantization_config"))] = any_value(rng)
    elif how == 1:
        holder.append(any_value(rng))
    elif how == 2 and type(holder[key]) is int:
        holder[key] = near(rng, holder[key])
    else:
        holder[key] = any_value(rng)
    return value


def _place(rng: random.Random, value):
    """A random (container, key) in `value`; (None, None) if it is empty or no container."""
    places, todo = [], [value]
    while todo:
        holder = todo.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        places += [(holder, key) for key in keys]
        todo += [holder[key] for key in keys]
    return rng.choice(places) if places else (None, None)


# ---- bundles


def mutate_bundle(rng: random.Random, base: File) -> bytes:
    """The bytes of a bundle with one to three mutations."""
    file = base.copy()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice((_entry, _entry, _entry, _metadata, _metadata, _names, _layout, _values))(rng, file)
    data = file.bytes()
    return rng.choice((_flip, _cut, _length))(rng, data) if rng.random() < 0.25 else data


def mutate_folder(rng: random.Random, folder: dict[str, bytes]) -> dict[str, bytes]:
    """A checkpoint with one file mutated, removed, renamed or copied."""
    files = dict(folder)
    name = rng.choice(list(files))
    if rng.random() < 0.1:
        content = files.pop(name)
        if rng.random() < 0.5:
            files[rng.choice(list(folder))] = content
    elif name.endswith(".json") and rng.random() < 0.8:
        value = json.loads(files[name])
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = mutate_json(rng, value)
        files[name] = json.dumps(value).encode()
    elif name.endswith(".json"):
        files[name] = rng.choice((_flip, _cut))(rng, files[name])
    else:
        files[name] = mutate_bundle(rng, parse_file(files[name]))
    return files


def _entry(rng, file):
    if not file.entries:
        return
    entry = file.entries[rng.choice(list(file.entries))]
    part = rng.choice(("dtype", "shape", "data_offsets"))
    if part == "dtype":
        entry["dtype"] = rng.choice(DTYPES)
    elif rng.random() < 0.15:
        entry[part] = any_value(rng)
    elif rng.random() < 0.1:
        del entry[part]
    else:
        numbers = list(entry[part]) if isinstance(entry.get(part), list) else []
        how = rng.randrange(4)
        if how == 0 or not numbers:
            numbers.insert(rng.randint(0, len(numbers)), rng.choice(INTEGERS))
        elif how == 1:
            numbers.reverse()
        elif how == 2 and type(numbers[0]) is int:
            at = rng.randrange(len(numbers))
            numbers[at] = near(rng, numbers[at]) if type(numbers[at]) is int else any_value(rng)
        else:
            numbers[rng.randrange(len(numbers))] = rng.choice((*INTEGERS, 1.0, "1", None, True))
        entry[part] = numbers


def _metadata(rng, file):
    part = rng.choice(("config", "config", "config", "quant", "format", "all"))
    if part == "all":
        file.metadata = rng.choice((None, [], {}, "KDTR 1", {"format": "pt"}, {"format": "KDTR 1"}))
    elif not isinstance(file.metadata, dict) or part not in file.metadata:
        return
    elif part == "format":
        file.metadata[part] = rng.choice(("KDTR 2", "", "pt", None, 1, "KDTR 1 "))
    elif rng.random() < 0.1:
        file.metadata[part] = rng.choice((None, 4, "", "{", "[]", "null", "[" * 10000, '{"a":1,"a":2}', "1e999", "NaN"))
    else:
        try:
            value = json.loads(file.metadata[part])
        except (TypeError, ValueError, RecursionError):
            return
        if isinstance(value, dict) and part == "config" and rng.random() < 0.6:
            name = rng.choice([*ModelConfig.__dataclass_fields__, "rope_scaling", "rope_parameters", "hidden_act"])
            old = value.get(name)
            value[name] = near(rng, old) if type(old) is int and rng.random() < 0.5 else any_value(rng)
        else:
            value = mutate_json(rng, value)
        file.metadata[part] = json.dumps(value)


def _names(rng, file):
    if not file.entries:
        return
    name = rng.choice(list(file.entries))
    how = rng.randrange(5)
    if how == 0:
        del file.entries[name]
    elif how == 1:
        other = rng.choice((name + "x", name.upper(), "", "a\nb", "\udc80", name.replace("0", "1"), "x" * 2000))
        file.entries[other] = file.entries.pop(name)
    elif how == 2:
        file.extra_header.append(f"{json.dumps(name)}: {json.dumps(file.entries[name])}")
    elif how == 3:
        file.entries["extra"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(file.data)] * 2}
    else:
        other = rng.choice(list(file.entries))
        file.entries[name], file.entries[other] = file.entries[other], file.entries[name]


def _layout(rng, file):
    how = rng.randrange(4)
    if how == 0:
        file.trailer += rng.randbytes(rng.choice((1, 4, 4096)))
    elif how == 1:
        file.data = file.data[: rng.randrange(len(file.data) + 1)]
    else:
        file.header_padding = rng.randrange(1, 64)  # whitespace is allowed, and puts tensors at odd addresses


def _values(rng, file):
    """Other weights: huge, tiny, infinite, NaN, zero."""
    data = bytearray(file.data)
    if not data:
        return
    begin = rng.randrange(len(data))
    length = rng.choice((1, 2, 4, 64, len(data)))
    pattern = rng.choice((b"\x00", b"\xff", b"\x7f\x7f", b"\x00\x00\x80\x7f", b"\x01\x00\x00\x00", rng.randbytes(64)))
    end = min(begin + length, len(data))
    data[begin:end] = (pattern * (length // len(pattern) + 1))[: end - begin]
    file.data = bytes(data)


def _flip(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if data:
            data[rng.randrange(min(len(data), rng.choice((8, 1 << 12, 1 << 30))))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _cut(rng, data):
    return data[: rng.choice((0, 1, 7, 8, 9, rng.randrange(len(data) + 1)))]


def _length(rng, data):
    return (rng.choice(INTEGERS) % 2**64).to_bytes(8, "little") + data[8:]
