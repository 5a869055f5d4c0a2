"""The peer Humming (humming-kernels, Apache-2.0): the same products by its JIT-compiled kernels.

Not among the requirements, as it compiles its kernels by NVRTC when it first runs; it is imported here alone, and only
when a benchmark asks for it. The configuration of every product is what its own heuristics say for that number of rows.
Of a layer it has the products and the activation; the order by expert and the weighted sum are probes.cu's.
"""

import functools
import json
from collections.abc import Callable

import torch

from engine.bench_cpu.subjects import GROUP
from engine.bench_cuda.subjects import Dense, Experts, Probes, Routing, Subject, copies, once, one_line, poisoned

SILU_AND_MULTIPLY = "a / (1.0f + __expf(-a)) * b"


def version() -> str:
    """Raises ImportError, or whatever importing it raises."""
    import humming.layer

    return humming.__version__


class Weights:
    """An INT4 matrix [n, k], or one an expert, in Humming's layout, and its product."""

    def __init__(self, n: int, k: int, n_experts: int | None):
        from humming.layer import HummingLayer

        with torch.device("cuda"):
            self._layer = HummingLayer(
                shape_n=n,
                shape_k=k,
                num_experts=n_experts,
                weight_config={"dtype": "int4", "group_size": GROUP},
                torch_dtype=torch.bfloat16,
            )
        self.kind = "indexed" if n_experts else "dense"
        self.codes, self.scales = self._layer.weight.data, self._layer.weight_scale.data  # as in a bundle

    def transform(self, n_copies: int = 1) -> None:
        """Codes and scales are set: into Humming's layout."""
        self.codes = self.scales = None
        self._layer.transform()
        found = {name: getattr(self._layer, name, None) for name in ("weight", "weight_scale", "weight_scale_2")}
        first = {name: x.data for name, x in found.items() if x is not None}
        self.copies = [first, *({n: x.clone() for n, x in first.items()} for _ in range(n_copies - 1))]

    def config(self, rows: int) -> dict:
        """Of a product of so many rows, or pairs of row and expert."""
        from humming.tune import get_heuristics_config

        return get_heuristics_config(self._layer.humming_config, shape_m=rows, gemm_type=self.kind)

    def compile(self, all_rows: list[int]) -> None:
        """All kernels side by side. What fails here fails again where it is used, and is told there."""
        from humming.kernel.humming import HummingKernel

        try:
            configs = {str(config): config for config in map(self.config, all_rows)}.values()
            intervals = [[0, 1 << 30, config] for config in configs]  # all numbers of rows: they are only compiled here
            HummingKernel.prepare_kernels(self._layer.humming_config.to_str(), self._compute(), intervals)
        except Exception as error:
            print(f"humming: {one_line(error)}", flush=True)

    def _compute(self) -> str:
        return json.dumps({"gemm_type": self.kind})

    def product(self, x: torch.Tensor, y: torch.Tensor, config: dict, copy: int = 0, **indices) -> Callable:
        from humming.forward import humming_forward

        return lambda: humming_forward(
            self._layer.humming_config,
            inputs=x,
            outputs=y,
            locks=self._layer.locks,
            compute_config=self._compute(),
            tuning_config=json.dumps(config, default=plain),
            **self.copies[copy],
            **indices,
        )


def dense(product: Dense, all_rows: list[int]) -> dict[str, Callable[[torch.Tensor], Subject]]:
    """Builders of subjects, by name."""

    def make() -> Weights:
        weights = Weights(product.n, product.k, None)
        weights.codes.copy_(torch.from_numpy(product.qw))
        weights.scales.copy_(product.scales)
        weights.transform(copies(product.n_bytes))
        weights.compile(all_rows)
        return weights

    made = once(make)

    def subject(x: torch.Tensor) -> Subject:
        y, config = poisoned(len(x), product.n), made().config(len(x))
        calls = [made().product(x, y, config, copy) for copy in range(len(made().copies))]

        def result():
            calls[0]()
            return y

        return Subject(calls, result, product.n_bytes)

    return {"humming": subject}


def experts(layer: Experts, all_rows: list[int]) -> dict[str, Callable]:
    """Builders of subjects, by name."""
    peer = once(lambda: Layer(layer, all_rows))
    return {
        "humming": lambda *arguments: peer().subject(("align", "gate_up", "silu", "down", "sum"), *arguments),
        "humming_gemms": lambda *arguments: peer().subject(("gate_up", "down"), *arguments),
    }


class Layer:
    """The experts of `of`, in Humming's layout."""

    def __init__(self, of: Experts, all_rows: list[int]):
        s = self._sizes = of.sizes
        self._probes = of.probes
        self._gate_up = Weights(2 * s.width, s.hidden, s.n_experts)
        self._down = Weights(s.hidden, s.width, s.n_experts)
        first = 2 * s.one_matrix  # weights of gate and up
        for expert in range(s.n_experts):
            words, groups = of.weights_of(expert)
            self._gate_up.codes[expert].view(-1).copy_(words[: first // 8])
            self._gate_up.scales[expert].view(-1).copy_(groups[: first // GROUP])
            self._down.codes[expert].view(-1).copy_(words[first // 8 :])
            self._down.scales[expert].view(-1).copy_(groups[first // GROUP :])
        for weights in (self._gate_up, self._down):
            weights.transform()
            weights.compile([rows * s.top_k for rows in all_rows])

    def subject(self, names: tuple[str, ...], x: torch.Tensor, routings: list[Routing], n_bytes: float) -> Subject:
        """The steps of these names as one call, for every routing; all write to the same memory."""
        from humming.ops import process_input

        s, rows, pairs = self._sizes, len(x), len(x) * self._sizes.top_k
        configs = self._gate_up.config(pairs), self._down.config(pairs)
        blocks = [int(config["block_shape"][0]) for config in configs]
        between, middle = poisoned(pairs, 2 * s.width), poisoned(pairs, s.width)
        down, y = poisoned(pairs, s.hidden), poisoned(rows, s.hidden)

        def silu():
            process_input(between, outputs=middle, activation_type="binary_split", activation_impl=SILU_AND_MULTIPLY)

        def weighted_sum(r: Routing):
            self._probes.sum(r.weights.data_ptr(), down.data_ptr(), y.data_ptr(), rows, s.top_k, s.hidden)

        steps = []
        for r in routings:
            order = {block: Aligned(self._probes, r, pairs, block, s.n_experts) for block in blocks}
            first, second = (order[block].indices for block in blocks)
            steps.append({
                "align": functools.partial(in_turn, list(order.values())),
                "gate_up": self._gate_up.product(x, between, configs[0], top_k=s.top_k, **first),
                "silu": silu,
                "down": self._down.product(middle, down, configs[1], top_k=1, **second),
                "sum": functools.partial(weighted_sum, r),
            })  # fmt: skip

        def result():
            for step in reversed(steps):  # the first routing's last
                y.fill_(float("nan"))
                in_turn(step.values())
            return y

        return Subject([functools.partial(in_turn, [step[name] for name in names]) for step in steps], result, n_bytes)


class Aligned:
    """Pairs of row and slot in the order of their experts, each expert's padded to whole blocks; made by a call."""

    def __init__(self, probes: Probes, r: Routing, pairs: int, block: int, n_experts: int):
        most = min(pairs * block, pairs + n_experts * (block - 1))
        most = -(-most // block) * block
        self._probes, self._routing, self._pairs, self._block = probes, r, pairs, block

        def empty(size):
            return torch.full((size,), pairs, dtype=torch.int32, device="cuda")

        self.indices = {"sorted_ids": empty(most), "expert_ids": torch.zeros_like(empty(most // block)),
                        "num_tokens_padded": torch.zeros_like(empty(1))}  # fmt: skip

    def __call__(self) -> None:
        pointers = (x.data_ptr() for x in self.indices.values())
        self._probes.align(self._routing.experts.data_ptr(), self._pairs, self._block, *pointers)


def in_turn(calls) -> None:
    for call in calls:
        call()


def plain(value):
    """What json does not know: an enum, a number of numpy."""
    return value.value if hasattr(value, "value") else value.item()
