"""Methods take turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

# Wall time is what a user waits; time on the processor says the same of one thread on a machine
# that others use, too.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Times = dict[str, dict[str, list[float]]]


def take_turns(methods: Mapping[str, Callable[[], None]], rounds: int) -> Times:
    """Seconds per clock, method and round, after one round that does not count."""
    seconds: Times = {clock: {name: [] for name in methods} for clock in CLOCKS}
    for turn in range(rounds + 1):
        for name, method in methods.items():
            started = {clock: now() for clock, now in CLOCKS.items()}
            method()
            if turn:
                for clock, now in CLOCKS.items():
                    seconds[clock][name].append(now() - started[clock])
    return seconds


def ratios(seconds: Times) -> dict[str, dict[str, float]]:
    """Per method: median seconds, and ratios to the first method, taken round by round."""
    summary = {}
    for name in seconds["wall"]:
        wall = to_first(seconds["wall"], name)
        summary[name] = {
            "seconds": median(seconds["wall"][name]),
            "ratio": median(wall),
            "least": min(wall),
            "largest": max(wall),
            "cpu_ratio": median(to_first(seconds["cpu"], name)),
        }
    return summary


def to_first(seconds: Mapping[str, list[float]], name: str) -> list[float]:
    """Ratio of a method to the first one, in each round."""
    first = next(iter(seconds.values()))
    return [mine / base for mine, base in zip(seconds[name], first, strict=True)]
