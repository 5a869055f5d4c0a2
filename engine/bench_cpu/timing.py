"""Times several subjects side by side on a machine that others may use too.

A round times every subject once, one right after the other, each round starting with another; so a round's ratio
compares like with like whatever else the machine does. The median over the rounds is quoted, and the best round, which
is what the machine does when nobody disturbs it.
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

    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        return min(self.samples)

    def ratio(self, other: "Times") -> float:
        """How many times as long the other takes: the median of the rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.samples, other.samples, strict=True))


def interleaved(subjects: Mapping[str, list[Callable]], rounds: int) -> dict[str, Times]:
    """Every subject is a list of functions that are called in turn."""
    position, burst = dict.fromkeys(subjects, 0), {}

    def sample(name: str, count: int) -> float:
        calls, first = subjects[name], position[name]
        position[name] += count
        begin = time.perf_counter()
        for i in range(first, first + count):
            calls[i % len(calls)]()
        return (time.perf_counter() - begin) / count

    for name in subjects:
        sample(name, 1)  # first calls set things up
        burst[name] = max(1, round(BURST_S / sample(name, 1)))
    samples = {name: [] for name in subjects}
    order = list(subjects)
    for _ in range(rounds):
        for name in order:
            time.sleep(PAUSE_S)
            samples[name].append(sample(name, burst[name]))
        order.append(order.pop(0))
    return {name: Times(values) for name, values in samples.items()}
