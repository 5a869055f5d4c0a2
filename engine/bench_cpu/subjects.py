"""What is timed: the INT4 operators on every path of the CPU library, and the same products by torch.

Every subject owns `copies` of its weights, more than the caches hold, and is called on one after the other, so that a
call reads its weights from memory, as in a decoder that walks through a model.
"""

import os
from dataclasses import dataclass

import numpy as np
import torch

from engine import contract
from engine.operators import Library, Operator, OperatorError, Resident

GROUP = 32
BFLOAT16 = contract.element_types()["kBFloat16"]
PATHS = ("avx512", "avx2", "portable")
STD_OF_INTEGERS = 4.6  # of uniform integers -8…7


def bits(x: torch.Tensor) -> np.ndarray:
    """bf16 as uint16, the same memory."""
    return x.view(torch.int16).numpy().view(np.uint16)


@dataclass(frozen=True)
class Matrix:
    """A random INT4 matrix [n, k] with bf16 scales, one a group, that keeps the scale of its input."""

    codes: torch.Tensor  # uint8 [n, k], 0…15
    scales: torch.Tensor  # bf16 [n, k/group]

    @classmethod
    def random(cls, n: int, k: int, seed: int) -> "Matrix":
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
        scales = (0.5 + torch.rand(n, k // GROUP, generator=generator)) / (STD_OF_INTEGERS * k**0.5)
        return cls(codes, scales.bfloat16())

    @property
    def n_bytes(self) -> int:
        """Of the packed matrix: what a product must read."""
        return self.codes.numel() // 2 + 2 * self.scales.numel()

    def qw(self) -> np.ndarray:
        """int32 [n, k/8], as in a bundle."""
        words = np.zeros((self.codes.shape[0], self.codes.shape[1] // 8), np.uint32)
        for i in range(8):
            words |= self.codes.numpy()[:, i::8].astype(np.uint32) << np.uint32(4 * i)
        return words.view(np.int32)

    def torch_packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, [k/group, n, 2] scales and zero points) as _weight_int4pack_mm_for_cpu takes them."""
        scales = self.scales.T
        return (
            torch._convert_weight_to_int4pack_for_cpu(self.codes.int(), 2),
            torch.stack([scales, torch.zeros_like(scales)], -1).contiguous(),
        )


def int4_product(x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch._weight_int4pack_mm_for_cpu(x, packed[0], GROUP, packed[1])


def operator_on(library: Library, path: str, name: str) -> Operator | None:
    """The operator of a path; None if this CPU lacks the path's instructions."""
    os.environ["KDTREE_CPU"] = path
    try:
        library.call(library.init)
    except OperatorError:
        return None
    return library.operator(name)


# ---- one matrix ------------------------------------------------------------------------------------------------------
class Gemm:
    """y = x @ w^T."""

    operator = "w4a16_gemm"

    def __init__(self, n: int, k: int, max_rows: int, copies: int):
        self.name, self.n, self.k, self.max_rows, self.copies = f"{k}→{n}", n, k, max_rows, copies
        self.matrix = Matrix.random(n, k, seed=n)

    def inputs(self, rows: int):
        return torch.randn(rows, self.k, generator=torch.Generator().manual_seed(rows)).bfloat16()

    def n_bytes(self, x: torch.Tensor) -> int:
        return self.matrix.n_bytes

    def ours(self, operator: Operator) -> "OurGemm":
        return OurGemm(self, operator)

    def torchs(self) -> "TorchGemm":
        return TorchGemm(self)


class OurGemm:
    def __init__(self, gemm: Gemm, operator: Operator):
        shape = dict(max_rows=gemm.max_rows, n=gemm.n, k=gemm.k, group=GROUP, x_row_stride=gemm.k,
                     y_row_stride=gemm.n, x_type=BFLOAT16, y_type=BFLOAT16, scale_type=BFLOAT16)  # fmt: skip
        weights = {"qw": gemm.matrix.qw(), "sc": bits(gemm.matrix.scales)}
        self._gemm, self._resident = gemm, Resident(operator, shape, weights, gemm.copies)
        self.close = self._resident.close

    def bind(self, x: torch.Tensor):
        """(one function a copy of the weights, the output they write)"""
        n_rows, y = np.array([len(x)], np.int32), torch.zeros(len(x), self._gemm.n, dtype=torch.bfloat16)
        pointers = {"n_rows": n_rows.ctypes.data, "x": x.data_ptr(), "add": None, "y": y.data_ptr()}
        calls = [self._resident.bind(copy, pointers) for copy in range(self._gemm.copies)]
        return [keep(call, n_rows, x) for call in calls], lambda: y


class TorchGemm:
    def __init__(self, gemm: Gemm):
        self._packed = [gemm.matrix.torch_packed() for _ in range(gemm.copies)]

    def close(self):
        self._packed.clear()

    def bind(self, x: torch.Tensor):
        calls = [lambda p=packed: int4_product(x, p) for packed in self._packed]
        return calls, calls[0]


# ---- experts ---------------------------------------------------------------------------------------------------------
class Experts:
    """y = sum over a row's experts of weight · down(silu(gate(x)) · up(x)). One copy: the experts are the copies."""

    operator = "w4a16_moe_experts"

    def __init__(self, hidden: int, intermediate: int, n_experts: int, top_k: int, max_rows: int):
        self.name = f"{n_experts} experts, top {top_k}: {hidden}→2·{intermediate}→{hidden}"
        self.hidden, self.intermediate, self.n_experts, self.top_k = hidden, intermediate, n_experts, top_k
        self.max_rows = max_rows
        self.gate, self.up = (Matrix.random(intermediate, hidden, seed) for seed in (1, 2))
        self.down = Matrix.random(hidden, intermediate, 3)

    def inputs(self, rows: int):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, self.hidden, generator=generator).bfloat16()
        scores = torch.rand(rows, self.n_experts, generator=generator)
        weights, experts = scores.topk(self.top_k)
        return x, experts.int(), weights / weights.sum(-1, keepdim=True)

    def n_bytes(self, inputs) -> int:
        hit = len(inputs[1].unique())
        return hit * (self.gate.n_bytes + self.up.n_bytes + self.down.n_bytes)

    def ours(self, operator: Operator) -> "OurExperts":
        return OurExperts(self, operator)

    def torchs(self) -> "TorchExperts":
        return TorchExperts(self)


class OurExperts:
    def __init__(self, e: Experts, operator: Operator):
        shape = dict(max_rows=e.max_rows, hidden=e.hidden, intermediate=e.intermediate, n_experts=e.n_experts,
                     top_k=e.top_k, group=GROUP, type=BFLOAT16, scale_type=BFLOAT16)  # fmt: skip
        matrices = {}
        for name in ("gate", "up", "down"):
            matrix = getattr(e, name)
            matrices |= {f"{name}_qw": matrix.qw(), f"{name}_sc": bits(matrix.scales)}
        weights = [{"expert": expert, **matrices} for expert in range(e.n_experts)]
        self._resident = Resident(operator, shape, weights, copies=1)
        self.close = self._resident.close

    def bind(self, inputs):
        x, experts, weights = inputs
        n_rows, y = np.array([len(x)], np.int32), torch.zeros_like(x)
        pointers = {"n_rows": n_rows.ctypes.data, "x": x.data_ptr(), "experts": experts.data_ptr(),
                    "weights": weights.data_ptr(), "shared": None, "residual": None, "y": y.data_ptr()}  # fmt: skip
        return [keep(self._resident.bind(0, pointers), n_rows, inputs)], lambda: y


class TorchExperts:
    """Gate and up as one product, as torch users do; an expert's rows are multiplied together."""

    def __init__(self, e: Experts):
        gate_up = Matrix(torch.cat([e.gate.codes, e.up.codes]), torch.cat([e.gate.scales, e.up.scales]))
        self._gate_up = [gate_up.torch_packed() for _ in range(e.n_experts)]
        self._down = [e.down.torch_packed() for _ in range(e.n_experts)]

    def close(self):
        self._gate_up.clear()
        self._down.clear()

    def bind(self, inputs):
        x, experts, weights = inputs
        hits = [(e, *torch.where(experts == e)) for e in experts.unique().tolist()]

        def run():
            y = torch.zeros(x.shape, dtype=torch.float32)
            for expert, rows, slots in hits:
                gate, up = int4_product(x[rows], self._gate_up[expert]).chunk(2, -1)
                out = int4_product(torch.nn.functional.silu(gate) * up, self._down[expert])
                y.index_add_(0, rows, out * weights[rows, slots, None])
            return y.bfloat16()

        return [run], run


def keep(call, *alive):
    """The call, which keeps alive what it points to."""

    def run():
        call()
        return alive

    return run
