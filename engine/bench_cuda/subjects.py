"""What is timed: the INT4 and float products of the library, and the same by torch (humming.py: by Humming).

A case is one shape at one number of rows. Its subjects all see the same weights and inputs, and each is checked against
a float64 product before it is timed. Weights are more than the caches hold: a dense subject has copies of its matrix,
the experts are their own copies, as eight routings take turns.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.bench_cpu.subjects import BFLOAT16, GROUP, Matrix, bits
from engine.bench_cuda import routing
from engine.operators import Library, Resident

COLD_BYTES = 300 << 20  # of weights in turn: several times the L2 cache
MAX_ROWS = 64  # what the library's launches are made for; the number of rows is read on the device


@dataclass(frozen=True)
class Subject:
    """`calls`: one a copy of the weights, each issued on torch's current stream. `result` makes the first and gives its
    output, which was NaN before where the subject does not allocate it. `n_bytes` must be read by a call."""

    calls: list[Callable]
    result: Callable[[], torch.Tensor]
    n_bytes: float


@dataclass(frozen=True)
class Case:
    """`make`: by name, what builds a subject; it may raise. `relative_error` judges a result."""

    labels: dict
    n_bytes: float
    make: dict[str, Callable[[], Subject]]
    relative_error: Callable[[torch.Tensor], float]


def stream() -> int:
    """torch's current stream as a cudaStream_t."""
    return torch.cuda.current_stream().cuda_stream


def relative(y: torch.Tensor, want: torch.Tensor) -> float:
    """|y - want| / |want|."""
    return float((y.double() - want).norm() / want.norm())


def poisoned(*sizes: int) -> torch.Tensor:
    return torch.full(sizes, float("nan"), dtype=torch.bfloat16, device="cuda")


def random_rows(k: int) -> torch.Tensor:
    """bf16 [MAX_ROWS, k]."""
    return torch.randn(MAX_ROWS, k, generator=torch.Generator().manual_seed(k)).bfloat16().cuda()


def count(rows: int) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.int32, device="cuda")


def copies(n_bytes: int) -> int:
    return -(-COLD_BYTES // n_bytes)


class Probes:
    """engine/bench_cuda/probes.cu."""

    def __init__(self, path: Path):
        self._c = ctypes.CDLL(str(Path(path).resolve()))
        pointer, integer, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._c.bench_expert_bytes.restype, self._c.bench_expert_bytes.argtypes = wide, [pointer]
        self._c.bench_read_step.restype, self._c.bench_read_step.argtypes = wide, []
        for name, *arguments in (
            ("fill", pointer, wide, pointer, pointer),
            ("pack", pointer, wide, pointer, pointer, pointer),
            ("gemms", pointer, pointer, pointer),
            ("read", pointer, wide, pointer),
            ("align", pointer, integer, integer, pointer, pointer, pointer),
            ("sum", pointer, pointer, pointer, integer, integer, integer),
        ):
            function = getattr(self._c, f"bench_{name}")
            function.restype, function.argtypes = integer, [*arguments, pointer]
            setattr(self, name, functools.partial(self._call, name, function))
        if status := self._c.bench_init():
            raise RuntimeError(f"{path}: CUDA error {status}")

    def _call(self, name: str, function, *arguments):
        """Issues it on torch's current stream."""
        if status := function(*arguments, stream()):
            raise RuntimeError(f"{name}: CUDA error {status}")

    def expert_bytes(self, shape: ctypes.Structure) -> int:
        return self._c.bench_expert_bytes(ctypes.byref(shape))

    def reader(self, most: int) -> tuple[Callable, int]:
        """(a call that reads device memory of its own, the bytes it reads)"""
        n_bytes = most // self._c.bench_read_step() * self._c.bench_read_step()
        memory = torch.ones(n_bytes // 8, dtype=torch.int64, device="cuda")
        sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        return lambda: self.read(memory.data_ptr(), n_bytes, sink.data_ptr()), n_bytes


# ---- one matrix ------------------------------------------------------------------------------------------------------
class Product:
    """y = x @ w^T by the library's `operator` and by peers, which a kind of matrix adds."""

    operator: str

    def __init__(self, library: Library, shape: dict, weights: dict, n_bytes: int):
        self.n, self.k, self.n_bytes = shape["n"], shape["k"], n_bytes
        self._x = random_rows(self.k)
        self._resident = Resident(library.operator(self.operator), shape, weights, copies(n_bytes))
        self._columns = torch.arange(0, self.n, max(1, self.n // 256), device="cuda")

    def close(self):
        self._resident.close()

    def cases(self, all_rows: list[int]) -> Iterator[Case]:
        labels = {"operator": self.operator, "shape": f"{self.k}→{self.n}"}
        for rows in all_rows:
            want = self._x[:rows].double() @ self._sampled().T
            make = {"ours": functools.partial(self._ours, rows)}
            make |= {name: functools.partial(peer, self._x[:rows]) for name, peer in self._peers().items()}
            yield Case(
                labels | {"rows": rows},
                self.n_bytes,
                make,
                lambda y, want=want: relative(y[:, self._columns], want),
            )

    def _ours(self, rows: int) -> Subject:
        n_rows, y = count(rows), poisoned(MAX_ROWS, self.n)
        pointers = {"n_rows": n_rows.data_ptr(), "x": self._x.data_ptr(), "add": None, "y": y.data_ptr()}
        arguments = [self._resident.arguments(copy, pointers) for copy in range(len(self._resident.packed))]
        calls = [keep(lambda a=a: self._resident.enqueue(a, stream()), n_rows, y) for a in arguments]

        def result():
            calls[0]()
            return y[:rows]

        return Subject(calls, result, self.n_bytes)

    def _sampled(self) -> torch.Tensor:
        """float64 [len(columns), k]: the outputs that are checked."""
        raise NotImplementedError

    def _peers(self) -> dict[str, Callable[[torch.Tensor], Subject]]:
        raise NotImplementedError


class Dense(Product):
    """INT4 weights. Peers: torch's tinygemm, the product of bf16 weights by cuBLAS, and what `more_peers` adds."""

    operator = "w4a16_gemm"

    def __init__(self, library: Library, n: int, k: int, more_peers: Callable[["Dense"], dict]):
        self.matrix = Matrix.random(n, k, seed=n)
        self.codes, self.scales = self.matrix.codes.cuda(), self.matrix.scales.cuda()
        self.qw = self.matrix.qw()
        shape = dict(max_rows=MAX_ROWS, n=n, k=k, group=GROUP, x_row_stride=k, y_row_stride=n, x_type=BFLOAT16,
                     y_type=BFLOAT16, scale_type=BFLOAT16)  # fmt: skip
        super().__init__(library, shape, {"qw": self.qw, "sc": bits(self.matrix.scales)}, self.matrix.n_bytes)
        self._more = more_peers(self)
        self._tinygemm_weights = functools.cache(self._pack_tinygemm)
        self._bf16_weights = functools.cache(self._dequantised)

    def _sampled(self):
        return dequantised(self.codes[self._columns], self.scales[self._columns])

    def _peers(self):
        return {"tinygemm": self._tinygemm, "cublas_bf16": self._cublas, **self._more}

    def _pack_tinygemm(self):
        pairs = (self.codes[:, ::2] << 4 | self.codes[:, 1::2]).contiguous()
        packed = torch._convert_weight_to_int4pack(pairs, 8)
        scales = self.scales.T
        with_zeros = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
        return [(packed.clone(), with_zeros.clone()) for _ in range(copies(self.n_bytes))]

    def _tinygemm(self, x: torch.Tensor) -> Subject:
        calls = [lambda w=w, s=s: torch._weight_int4pack_mm(x, w, GROUP, s) for w, s in self._tinygemm_weights()]
        return Subject(calls, calls[0], self.n_bytes)

    def _dequantised(self):
        w = dequantised(self.codes, self.scales, torch.float32).bfloat16()
        return [w.clone() for _ in range(copies(2 * w.numel()))]

    def _cublas(self, x: torch.Tensor) -> Subject:
        return linear(x, self._bf16_weights())


class Float(Product):
    """bf16 weights. Peer: cuBLAS."""

    operator = "gemm"

    def __init__(self, library: Library, n: int, k: int):
        self._w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5
        shape = dict(max_rows=MAX_ROWS, n=n, k=k, batch=1, x_row_stride=k, x_batch_stride=0, y_row_stride=n,
                     y_batch_stride=0, x_type=BFLOAT16, y_type=BFLOAT16, w_type=BFLOAT16)  # fmt: skip
        super().__init__(library, shape, {"w": bits(self._w.cpu()), "type": BFLOAT16}, 2 * n * k)
        self._weights = [self._w, *(self._w.clone() for _ in range(copies(2 * n * k) - 1))]

    def _sampled(self):
        return self._w[self._columns].double()

    def _peers(self):
        return {"cublas_bf16": lambda x: linear(x, self._weights)}


def linear(x: torch.Tensor, weights: list[torch.Tensor]) -> Subject:
    calls = [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]
    return Subject(calls, calls[0], 2 * weights[0].numel())


def dequantised(codes: torch.Tensor, scales: torch.Tensor, dtype=torch.float64) -> torch.Tensor:
    """(code - 8) · scale."""
    return (codes.to(dtype) - 8) * scales.to(dtype).repeat_interleave(GROUP, -1)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, k/8] as in a bundle -> codes [n, k]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).flatten(-2)


# ---- experts ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sizes:
    """Of a layer; the defaults are Kimi K2's."""

    hidden: int = 7168
    width: int = 2048
    n_experts: int = 384
    top_k: int = 8

    @property
    def one_matrix(self) -> int:
        return self.hidden * self.width

    @property
    def expert_bytes(self) -> int:
        return routing.int4_bytes(3 * self.one_matrix, GROUP)


@dataclass(frozen=True)
class Routing:
    """int32 and float32 [MAX_ROWS, top_k] on the device, rows past the call -1; `hit`: experts that have rows."""

    rows: int
    experts: torch.Tensor
    weights: torch.Tensor
    hit: int


class Experts:
    """y = sum over a row's experts of weight · down(silu(gate(x)) · up(x)), made on the device expert by expert.

    `more_peers` of this layer gives builders of subjects, by name: functions of x [rows, hidden], the routings and the
    bytes of a call.
    """

    operator = "w4a16_moe_experts"
    N_ROUTINGS = 8

    def __init__(self, library: Library, probes: Probes, sizes: Sizes, more_peers: Callable[["Experts"], dict]):
        s = self.sizes = sizes
        shape = dict(max_rows=MAX_ROWS, hidden=s.hidden, intermediate=s.width, n_experts=s.n_experts, top_k=s.top_k,
                     group=GROUP, type=BFLOAT16, scale_type=BFLOAT16)  # fmt: skip
        self.probes, self._resident = probes, Resident(library.operator(self.operator), shape, None, copies=1)
        expected = s.n_experts * probes.expert_bytes(self._resident.shape)
        if self._resident.packed_bytes != expected:
            raise RuntimeError(f"the library packs {self._resident.packed_bytes} bytes, the probes {expected}")
        self._codes = torch.empty(3 * s.one_matrix // 8, dtype=torch.int32, device="cuda")
        self._scales = torch.empty(3 * s.one_matrix // GROUP, dtype=torch.bfloat16, device="cuda")
        self._x = random_rows(s.hidden)
        for expert in range(s.n_experts):
            codes, scales = self.weights_of(expert)
            pointers = codes.data_ptr(), scales.data_ptr(), self._resident.packed[0]
            probes.pack(ctypes.byref(self._resident.shape), expert, *pointers)
        torch.cuda.synchronize()
        self._more = more_peers(self)

    def close(self):
        self._resident.close()

    def weights_of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate, up and down as in a bundle, one after the other: codes, 8 a word, and scales. Until the next call."""
        pointers = self._codes.data_ptr(), self._scales.data_ptr()
        self.probes.fill(ctypes.byref(self._resident.shape), expert, *pointers)
        return self._codes, self._scales

    def cases(self, all_rows: list[int]) -> Iterator[Case]:
        for kind, draw in (("uniform", routing.uniform), ("correlated", routing.correlated)):
            for rows in all_rows:
                if kind == "correlated" and rows < 16:
                    continue
                rng = np.random.default_rng(rows)
                routings = [self._routing(draw(rows, self.sizes.n_experts, self.sizes.top_k, rng), rng)
                            for _ in range(self.N_ROUTINGS)]  # fmt: skip
                hit = sum(r.hit for r in routings) / len(routings)
                n_bytes = hit * self.sizes.expert_bytes
                ours = functools.cache(functools.partial(self._ours, routings, n_bytes))
                make = {"ours": lambda ours=ours: ours()[0], "ours_gemms": lambda ours=ours: ours()[1]}
                for name, peer in self._more.items():
                    make[name] = functools.partial(peer, self._x[:rows], routings, n_bytes)
                shape = f"{self.sizes.n_experts} experts of {self.sizes.width}, top {self.sizes.top_k}"
                labels = {"operator": self.operator, "shape": shape, "routing": kind, "rows": rows}
                sampled = sorted({0, rows - 1})
                want = self._reference(routings[0], sampled)
                yield Case(
                    labels | {"experts_hit": round(hit, 2)},
                    n_bytes,
                    make,
                    lambda y, want=want, sampled=sampled: relative(y[sampled], want),
                )

    def _routing(self, ids: np.ndarray, rng: np.random.Generator) -> Routing:
        padded = np.full((MAX_ROWS, self.sizes.top_k), -1, np.int32)
        padded[: len(ids)] = ids
        weights = rng.random(padded.shape, np.float32)
        weights *= 2.8 / weights.sum(1, keepdims=True)
        return Routing(len(ids), torch.from_numpy(padded).cuda(), torch.from_numpy(weights).cuda(),
                       routing.experts_hit(ids))  # fmt: skip

    def _ours(self, routings: list[Routing], n_bytes: float) -> tuple[Subject, Subject]:
        """The whole layer, and its GEMMs alone in the workspaces that the layer has sorted into."""
        shape = ctypes.byref(self._resident.shape)
        layer, gemms, outputs = [], [], []
        for r in routings:
            n_rows, y = count(r.rows), poisoned(MAX_ROWS, self.sizes.hidden)
            workspace = torch.full((self._resident.workspace_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
            args = self._resident.arguments(0, {
                "n_rows": n_rows.data_ptr(), "x": self._x.data_ptr(), "experts": r.experts.data_ptr(),
                "weights": r.weights.data_ptr(), "shared": None, "residual": None, "y": y.data_ptr()})  # fmt: skip
            layer.append(keep(lambda a=args, w=workspace: self._resident.enqueue(a, stream(), w.data_ptr()),
                              n_rows, y, workspace, r))  # fmt: skip
            gemms.append(keep(lambda a=args, w=workspace: self.probes.gemms(shape, ctypes.byref(a), w.data_ptr()),
                              n_rows, y, workspace, r))  # fmt: skip
            outputs.append(y)

        def result():
            for call in layer:
                call()
            return outputs[0][: routings[0].rows]

        return Subject(layer, result, n_bytes), Subject(gemms, result, n_bytes)

    def _reference(self, r: Routing, rows: list[int]) -> torch.Tensor:
        """float64 [len(rows), hidden]."""
        s, y = self.sizes, torch.zeros(len(rows), self.sizes.hidden, dtype=torch.float64, device="cuda")
        for i, row in enumerate(rows):
            x = self._x[row].double()
            for expert, weight in zip(r.experts[row].tolist(), r.weights[row].tolist(), strict=True):
                codes, scales = self.weights_of(expert)
                words, groups = codes.view(3, -1), scales.view(3, -1)
                gate, up = (
                    dequantised(unpacked(words[m].view(s.width, -1)), groups[m].view(s.width, -1)) @ x for m in (0, 1)
                )
                down = dequantised(unpacked(words[2].view(s.hidden, -1)), groups[2].view(s.hidden, -1))
                y[i] += weight * (down @ (torch.nn.functional.silu(gate) * up))
        return y


def keep(call: Callable, *alive) -> Callable:
    """The call, which keeps alive what it points to."""

    def run():
        call()
        return alive

    return run


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def once(make: Callable) -> Callable:
    """`make`, called once: later calls give what it gave, or raise what it raised."""

    @functools.cache
    def outcome():
        try:
            return make(), None
        except Exception as error:
            return None, error

    def made():
        value, error = outcome()
        if error:
            raise error
        return value

    return made
