"""A safetensors file in memory: its header is checked, its tensors are read only where they are touched."""

import json
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

NUMPY = {"F32": np.float32, "BF16": np.uint16, "I32": np.int32, "I64": np.int64}  # what anything here reads
MAX_HEADER_BYTES = 100 << 20  # the format's own limit
FETCH_BYTES = 4 << 20  # at once: stays in the processor's cache

Fail = Callable[[object, object, str], NoReturn]  # field, value, reason; raises the caller's error


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the header; `begin` and `end` count bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class MappedFile:
    """`entries` by name, and `metadata`. Everything the header claims lies within the file, without overlap."""

    def __init__(self, path: Path, fail: Fail):
        self.path, self._fail = path, fail
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
                fail("file", path.name, "not a regular file")
            with open(path, "rb") as file:
                self._size = size = file.seek(0, 2)
                if size < 8:
                    fail("size", size, "too short for a safetensors file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            fail("file", error.strerror, "cannot be read")
        self._bytes = np.frombuffer(self._map, np.uint8)
        length = int.from_bytes(self._map[:8], "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            fail("header length", length, "longer than the file, or no safetensors file")
        header = parse_json(self._map[8 : 8 + length], "header", fail)
        self.metadata = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict):
            fail("__metadata__", self.metadata, "must be a map")
        self.entries = {name: _entry(name, entry, 8 + length, size, fail) for name, entry in header.items()}
        _check_extents(self.entries, 8 + length, size, fail)

    def __del__(self):
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def check_size(self) -> None:
        """To be called before tensors are read: touching a page past the file's end would end the process."""
        size = os.fstat(self._descriptor).st_size
        if size < self._size:
            self._fail("size", size, f"{self._size} bytes when it was opened: shortened since")

    def array(self, entry: Entry) -> np.ndarray:
        """The tensor's values as a view, bf16 as uint16; a copy only where the file holds them unaligned."""
        self.check_size()
        values = self._bytes[entry.begin : entry.end].view(NUMPY[entry.dtype]).reshape(entry.shape)
        return values if values.flags.aligned else values.copy()

    def fetch(self, entry: Entry) -> None:
        """Reads a tensor into the page cache, for a thread beside the one that will touch it."""
        piece = bytearray(min(FETCH_BYTES, entry.end - entry.begin))
        for at in range(entry.begin, entry.end, FETCH_BYTES):
            os.preadv(self._descriptor, [piece], at)

    def forget(self, entry: Entry) -> None:
        """Takes a tensor's pages out of this process; touched again, they come back."""
        begin = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, begin, entry.end - begin)


def parse_json(text: str | bytes, field: str, fail: Fail) -> dict:
    """A JSON object; two equal keys in one object are an error, for one of them would go unseen."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        fail(field, error, "no JSON: damaged, or another kind of file")
    if not isinstance(value, dict):
        fail(field, type(value).__name__, "must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice} stands there twice")
    return made


def _entry(name: str, entry: object, start: int, size: int, fail: Fail) -> Entry:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = isinstance(dtype, str) and isinstance(shape, list)
        sound = sound and all(type(extent) is int and 0 <= extent < 1 << 62 for extent in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or len(shape) > 8:
        fail(name, entry, "not a safetensors entry")
    if begin > end or start + end > size:
        fail(name, f"bytes {begin} to {end}", f"the file holds {size - start}: truncated?")
    if dtype in NUMPY:
        wanted = np.dtype(NUMPY[dtype]).itemsize
        for extent in shape:
            wanted *= extent
        if end - begin != wanted:
            fail(name, f"{end - begin} bytes", f"{dtype} {shape} needs {wanted}")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _check_extents(entries: dict[str, Entry], start: int, size: int, fail: Fail) -> None:
    """Tensors lie one behind the other: no overlap, no gap, nothing after the last."""
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            fail(name, f"starts at byte {entry.begin - start}", f"the tensor before it ends at {at - start}")
        at = entry.end
    if at != size:
        fail("size", size - start, f"the tensors end at byte {at - start}")
