"""One operator at a time, on numpy arrays: what the checks and the benchmarks call.

The arguments of a call are copied into the backend's memory, each between two guards; outputs and scratch start as
0xFF bytes, which are NaN in every float type and -1 in every integer type. What an operator reads from where it must
not is therefore NaN, and what it writes where it must not is an error. bf16 arrays are uint16.
"""

import ctypes
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine import contract

POISON = 0xFF
GUARD_BYTES = 256  # the alignment of the backend's memory


class OperatorError(RuntimeError):
    """The backend's own error, or a call that breaks the contract."""


class Refused(OperatorError):
    """The backend cannot run this shape; the message names the field."""


@dataclass(frozen=True)
class Output:
    """An argument that the operator writes: it starts as poison."""

    shape: tuple[int, ...]
    dtype: object = np.float32


@dataclass(frozen=True)
class View:
    """An argument that points `offset` elements into `base` (an array or an Output): a slice of a wider row."""

    base: object
    offset: int


@dataclass(frozen=True)
class Alias:
    """The same pointer as argument `name`, which the operator writes: an operation in place."""

    name: str


@dataclass(frozen=True)
class Call:
    """Everything an operator is called with. `weights`: fields of <Op>Weights, or a list of such for experts."""

    shape: dict
    args: dict
    weights: dict | list | None = None


def poisoned(shape, dtype) -> np.ndarray:
    """An array of 0xFF bytes."""
    return np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype).reshape(shape)


def decode_state(**fields) -> np.ndarray:
    """DecodeState as a structured array of shape (1,); fields that are not named are 0."""
    state = np.zeros(1, np.dtype(contract.decode_state().structs["DecodeState"].ctype))
    for name, value in fields.items():
        state[name] = value
    return state


class Library:
    """A backend's library, loaded and initialised. One process, one library."""

    def __init__(self, path):
        self.path = Path(path).resolve()
        self._c = ctypes.CDLL(str(self.path))
        size, pointer, text = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
        for name, result, *arguments in (
            ("kdtree_error", text),
            ("kdtree_backend", text),
            ("kdtree_variant", text),
            ("kdtree_init", ctypes.c_int),
            ("kdtree_find_operator", pointer, text),
            ("kdtree_refuse", text, pointer, pointer),
            ("kdtree_packed_bytes", size, pointer, pointer),
            ("kdtree_prepare", ctypes.c_int, pointer, pointer, pointer, pointer),
            ("kdtree_workspace", size, pointer, pointer),
            ("kdtree_run", ctypes.c_int, pointer, pointer, pointer, pointer),
            ("kdtree_enqueue", ctypes.c_int, pointer, pointer, pointer, pointer, pointer),
            ("kdtree_allocate", pointer, size),
            ("kdtree_release", None, pointer),
            ("kdtree_upload", ctypes.c_int, pointer, pointer, size),
            ("kdtree_download", ctypes.c_int, pointer, pointer, size),
        ):
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("kdtree_"), function)
        self.call(self.init)

    @property
    def backend_name(self) -> str:
        return self.backend().decode()

    @property
    def variant_name(self) -> str:
        """The CPU's instruction set or the GPU's architecture that the operators use."""
        return self.variant().decode()

    def call(self, function, *arguments):
        """Calls a function that returns 0 on success. Raises OperatorError with the library's reason."""
        if function(*arguments):
            raise OperatorError((self.error() or b"unknown error").decode())

    def operator(self, name: str) -> "Operator":
        return Operator(self, name)

    @contextmanager
    def threads(self, count: int):
        """Runs the body with `count` OpenMP threads, where the backend uses OpenMP."""
        try:
            get, put = self._c.omp_get_max_threads, self._c.omp_set_num_threads
        except AttributeError:
            yield
            return
        before = get()
        put(count)
        try:
            yield
        finally:
            put(before)


class _Buffer:
    """Backend memory of `size` bytes, as `contents` has them or poison, between two guards of poison."""

    def __init__(self, library: Library, size: int, what: str, contents: np.ndarray | None = None):
        self.library, self.what, self.bytes = library, what, size
        total = size + 2 * GUARD_BYTES
        self._memory = library.allocate(total)
        if not self._memory:
            raise OperatorError(f"{what}: no memory for {total} bytes")
        image = poisoned(total, np.uint8)
        if contents is not None:
            image[GUARD_BYTES : GUARD_BYTES + size] = contents.reshape(-1).view(np.uint8)
        library.call(library.upload, self._memory, image.ctypes.data, total)
        self.pointer = self._memory + GUARD_BYTES

    def read(self) -> np.ndarray:
        """The bytes as they are now. Raises OperatorError if a guard has changed."""
        image = np.empty(self.bytes + 2 * GUARD_BYTES, np.uint8)
        self.library.call(self.library.download, image.ctypes.data, self._memory, image.nbytes)
        before, after = image[:GUARD_BYTES], image[GUARD_BYTES + self.bytes :]
        for guard, where in ((before, "before the start"), (after, "past the end")):
            if (guard != POISON).any():
                raise OperatorError(f"{self.what}: written {where} of its {self.bytes} bytes")
        return image[GUARD_BYTES : GUARD_BYTES + self.bytes]

    def release(self):
        self.library.release(self._memory)


class Operator:
    """One operator of a backend's library. Raises OperatorError if the library has none of that name."""

    def __init__(self, library: Library, name: str):
        self.library, self.name = library, name
        self.contract = contract.contract(name)
        self._handle = library.find_operator(name.encode())
        if not self._handle:
            raise OperatorError(f"{name}: the {library.backend_name} library has no such operator")

    def _shape(self, shape: dict) -> ctypes.Structure:
        return _fill(self.contract.shape, shape)

    def refuse(self, shape: dict) -> str | None:
        """None if the backend can run the shape, else why not; the reason names the field."""
        reason = self.library.refuse(self._handle, ctypes.byref(self._shape(shape)))
        return reason.decode() if reason else None

    def run(self, call: Call) -> dict[str, np.ndarray]:
        """Runs the operator once.

        Returns every argument that the contract does not declare const (a View as its whole base), as it lies in
        memory afterwards. Raises Refused, OperatorError if the backend fails or memory changed that must not, and
        ValueError for arguments that do not fit the contract.
        """
        with ExitStack() as stack:
            shape = self._shape(call.shape)
            if reason := self.refuse(call.shape):
                raise Refused(f"{self.name}: {reason}")

            def buffer(size, what, contents=None):
                made = _Buffer(self.library, size, f"{self.name}: {what}", contents)
                stack.callback(made.release)
                return made

            workspace = buffer(self.library.workspace(self._handle, ctypes.byref(shape)), "workspace")
            packed = packed_before = None
            if self.contract.weights is not None:
                packed = buffer(self.library.packed_bytes(self._handle, ctypes.byref(shape)), "packed")
                self._prepare(shape, call.weights, packed.pointer)
                packed_before = packed.read()

            buffers, pointers = {}, {"packed": packed.pointer} if packed else {}
            for name, value in call.args.items():
                if value is None or isinstance(value, Alias):
                    continue
                contents, offset = self._contents(name, value)
                buffers[name] = (buffer(contents.nbytes, name, contents), contents)
                pointers[name] = buffers[name][0].pointer + offset
            for name, value in call.args.items():
                if value is None:
                    pointers[name] = None
                elif isinstance(value, Alias):
                    pointers[name] = pointers[value.name]
            args = _fill(self.contract.args, pointers)

            self.library.call(
                self.library.run, self._handle, ctypes.byref(shape), ctypes.byref(args), workspace.pointer
            )

            outputs = {}
            for name, (made, contents) in buffers.items():
                now = made.read()
                if not self.contract.args.field(name).const:
                    outputs[name] = now.view(contents.dtype).reshape(contents.shape)
                elif not np.array_equal(now, contents.reshape(-1).view(np.uint8)):
                    raise OperatorError(f"{self.name}: {name}: an input was written")
            workspace.read()
            if packed and not np.array_equal(packed.read(), packed_before):
                raise OperatorError(f"{self.name}: packed: the weights were written")
            return outputs

    def _prepare(self, shape, weights, packed):
        for part in weights if isinstance(weights, list) else [weights]:
            host = {name: np.ascontiguousarray(v) if isinstance(v, np.ndarray) else v for name, v in part.items()}
            for name, value in host.items():
                if isinstance(value, np.ndarray):
                    _check_dtype(self.contract.weights.field(name), value.dtype)
            values = {n: v.ctypes.data if isinstance(v, np.ndarray) else v for n, v in host.items()}
            struct = _fill(self.contract.weights, values)
            self.library.call(self.library.prepare, self._handle, ctypes.byref(shape), ctypes.byref(struct), packed)

    def _contents(self, name, value) -> tuple[np.ndarray, int]:
        """What argument `name` starts as, and the bytes from there to where its pointer points."""
        field = self.contract.args.field(name)
        offset = 0
        if isinstance(value, View):
            value, offset = value.base, value.offset
        if isinstance(value, int):
            value = np.array([value], np.int32)
        if isinstance(value, Output):
            if field.const:
                raise ValueError(f"{self.name}: {name}: an Output, but the operator only reads it")
            value = poisoned(value.shape, value.dtype)
        _check_dtype(field, value.dtype)
        contents = np.ascontiguousarray(value)
        return contents, offset * contents.itemsize


class Resident:
    """An operator with `copies` of its weights in the backend's memory, for timing. Close it, or use it in `with`.

    `shape` and `weights` are those of a Call; without weights the caller fills `packed` himself. Raises Refused and
    OperatorError.
    """

    def __init__(self, operator: Operator, shape: dict, weights: dict | list | None, copies: int):
        self._operator, self._library, self._memory = operator, operator.library, []
        if reason := operator.refuse(shape):
            raise Refused(f"{operator.name}: {reason}")
        self.shape = operator._shape(shape)
        handle, pointer = operator._handle, ctypes.byref(self.shape)
        self.workspace_bytes = self._library.workspace(handle, pointer)
        self.packed_bytes = self._library.packed_bytes(handle, pointer)
        self._workspace = self._allocate(self.workspace_bytes)
        self.packed = [self._allocate(self.packed_bytes) for _ in range(copies)]
        if weights is not None:
            for packed in self.packed:
                operator._prepare(self.shape, weights, packed)

    def arguments(self, copy: int, pointers: dict) -> ctypes.Structure:
        """<Op>Args with the weights of `copy`. `pointers`: of all other fields, to the backend's memory, or None."""
        return _fill(self._operator.contract.args, pointers | {"packed": self.packed[copy]})

    def bind(self, copy: int, pointers: dict):
        """A function of no arguments that runs the operator to its end."""
        args = self.arguments(copy, pointers)
        shape, handle, library = self.shape, self._operator._handle, self._library
        return lambda: library.call(library.run, handle, ctypes.byref(shape), ctypes.byref(args), self._workspace)

    def enqueue(self, args: ctypes.Structure, stream: int | None, workspace: int | None = None) -> None:
        """Issues the operator on the backend's stream (0 or None: its default) and does not wait."""
        handle, shape = self._operator._handle, ctypes.byref(self.shape)
        self._library.call(
            self._library.enqueue, handle, shape, ctypes.byref(args), workspace or self._workspace, stream
        )

    def _allocate(self, size: int) -> int:
        memory = self._library.allocate(size)
        if not memory:
            raise OperatorError(f"{self._operator.name}: no memory for {size} bytes")
        self._memory.append(memory)
        return memory

    def close(self):
        while self._memory:
            self._library.release(self._memory.pop())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _check_dtype(field: contract.Field, dtype):
    """A pointer to T takes arrays of T; a `void*` takes float32, bf16 as uint16."""
    wanted = {
        "void": (np.float32, np.uint16),
        "float": (np.float32,),
        "int32_t": (np.int32,),
        "DecodeState": (np.dtype(contract.decode_state().structs["DecodeState"].ctype),),
    }[field.type]
    if not field.pointer or dtype not in [np.dtype(d) for d in wanted]:
        raise ValueError(f"{field.name}: {dtype}: the contract says {field.type}{'*' * field.pointer}")


def _fill(struct: contract.Struct, values: dict) -> ctypes.Structure:
    """A struct with every field set. Raises ValueError naming what is missing or unknown."""
    names = {field.name for field in struct.fields}
    if missing := names - values.keys():
        raise ValueError(f"{struct.name}: {', '.join(sorted(missing))}: not given")
    if unknown := values.keys() - names:
        raise ValueError(f"{struct.name}: {', '.join(sorted(unknown))}: no such field")
    return struct.ctype(**values)
