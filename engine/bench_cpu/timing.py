"""Times several subjects side by side on a machine that others may use too.

A round times every subject once, one right after the other, each round starting with another; so a round's ratio
compares like with like whatever else the machine does, and the median over the rounds is quoted. Beside the wall clock
stands the processor time of all threads, which does not count what other programs took; waiting threads must sleep
(OMP_WAIT_POLICY=passive), or it counts that.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

BURST_S = 0.005  # a sample is the mean of as many calls as take about this long
PAUSE_S = 0.002  # between subjects: the last one's waiting threads go to sleep


@dataclass(frozen=True)
class Times:
    """Seconds a call, by round."""

    wall: list[float]
    cpu: list[float]

    def milliseconds(self) -> dict:
        """Medians of both clocks, and the wall clock's best."""
        seconds = {
            "wall_ms": statistics.median(self.wall),
            "best_ms": min(self.wall),
            "cpu_ms": statistics.median(self.cpu),
        }
        return {name: round(1e3 * value, 3) for name, value in seconds.items()}

    def ratios(self, other: "Times", factor: float = 1) -> dict:
        """How many times as long the other takes (times `factor`), by both clocks: medians of the rounds' ratios."""
        return {
            clock: round(factor * statistics.median(b / a for a, b in zip(mine, others, strict=True)), 2)
            for clock, mine, others in (("wall", self.wall, other.wall), ("cpu", self.cpu, other.cpu))
        }


def interleaved(subjects: Mapping[str, list[Callable]], rounds: int) -> dict[str, Times]:
    """Every subject is a list of functions that are called in turn."""
    position, burst = dict.fromkeys(subjects, 0), {}

    def sample(name: str, count: int) -> tuple[float, float]:
        calls, first = subjects[name], position[name]
        position[name] += count
        wall, cpu = time.perf_counter(), time.process_time()
        for i in range(first, first + count):
            calls[i % len(calls)]()
        return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count

    for name in subjects:
        sample(name, 1)  # first calls set things up
        burst[name] = max(1, round(BURST_S / sample(name, 1)[0]))
    times = {name: Times([], []) for name in subjects}
    order = list(subjects)
    for _ in range(rounds):
        for name in order:
            time.sleep(PAUSE_S)
            wall, cpu = sample(name, burst[name])
            times[name].wall.append(wall)
            times[name].cpu.append(cpu)
        order.append(order.pop(0))
    return times
