"""Times several subjects side by side on a GPU.

A subject is a CUDA graph of calls that take one copy of the weights after another, so a call reads its weights from
memory. A round replays every subject once, each round starting with another; quoted are median, p10 and p90 over the
rounds. Then each subject runs for BURST_S by itself while the clock and the power are read: both tell whether the
card was at its limit.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

GRAPH_BYTES = 1 << 30  # of weights that a graph reads at least: far above what its launch costs
WARM_ROUNDS = 3
BURST_S = 0.35
BATCH_US = 20_000  # issued at once in a burst: longer than reading the sensors takes
AHEAD_CYCLES = 400_000  # the GPU spins this long while the host issues events and graph, so that none is waited for


@dataclass(frozen=True)
class Spread:
    """Microseconds a call."""

    p10: float
    median: float
    p90: float

    @classmethod
    def of(cls, times: list[float]) -> "Spread":
        ordered = sorted(times)
        return cls(ordered[len(ordered) // 10], statistics.median(ordered), ordered[len(ordered) * 9 // 10])

    def record(self) -> dict:
        return {name: round(value, 2) for name, value in vars(self).items()}


def passes(n_calls: int, n_bytes: float) -> int:
    """How often a graph takes all its calls, each of which reads n_bytes."""
    return max(1, -(-GRAPH_BYTES // int(n_calls * n_bytes)))


def interleaved(subjects: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Spread]:
    """Every subject is a function that runs it once and says the microseconds a call took."""
    times = {name: [] for name in subjects}
    order = list(subjects)
    for round_ in range(WARM_ROUNDS + rounds):
        for name in order:
            microseconds = subjects[name]()
            if round_ >= WARM_ROUNDS:
                times[name].append(microseconds)
        order.append(order.pop(0))
    return {name: Spread.of(values) for name, values in times.items()}


class Replay:
    """A graph of all calls, `passes` times over, on a stream of its own. A call is issued on torch's current stream."""

    def __init__(self, stream: torch.cuda.Stream, calls: list[Callable], passes: int):
        self._stream, self._count = stream, passes * len(calls)
        self._calls = calls  # they own the memory that the graph reads and writes
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # first calls compile and load, which a capture must not
                call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(passes):
                for call in calls:
                    call()
        torch.cuda.synchronize()

    def time(self) -> float:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(AHEAD_CYCLES)
            self._begin.record()
            self._graph.replay()
            self._end.record()
        self._end.synchronize()
        return 1e3 * self._begin.elapsed_time(self._end) / self._count

    def burst(self, microseconds: float, sensors: "Sensors") -> dict:
        """Clock and power while it runs; `microseconds`: of a call."""
        at_once = max(1, int(BATCH_US / (microseconds * self._count)))
        samples, started, ahead = [], time.perf_counter(), None
        with torch.cuda.stream(self._stream):
            while (elapsed := time.perf_counter() - started) < BURST_S:
                for _ in range(at_once):
                    self._graph.replay()
                event = torch.cuda.Event()
                event.record()
                if ahead is not None:  # one batch is always under way
                    ahead.synchronize()
                ahead = event
                if elapsed > BURST_S / 2:
                    samples.append(sensors.read())
        torch.cuda.synchronize()
        return {
            name: statistics.median(values) if (values := [s[name] for s in samples if s.get(name)]) else None
            for name in ("sm_mhz", "watts")
        }


class Sensors:
    """The GPU's own, by NVML. `reason` says why there are none."""

    def __init__(self):
        self.reason = self.driver = self._handle = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
            driver = pynvml.nvmlSystemGetDriverVersion()
            self.driver = driver.decode() if isinstance(driver, bytes) else driver
        except Exception as error:  # not installed, or not allowed: times are what counts
            self.reason = f"{type(error).__name__}: {error}"

    def read(self) -> dict:
        """{sm_mhz, watts}, as far as they can be read."""
        values = {}
        if self._handle is not None:
            with contextlib.suppress(Exception):
                values["sm_mhz"] = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
            with contextlib.suppress(Exception):
                values["watts"] = self._milliwatts() // 1000
        return values

    def _milliwatts(self) -> int:
        """Of this moment, where the card says it: PowerUsage is the mean over a second."""
        with contextlib.suppress(Exception):
            field = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if field.nvmlReturn == 0 and field.value.uiVal > 0:
                return field.value.uiVal
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle)
