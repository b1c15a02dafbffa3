"""Methods take turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median


def take_turns(
    methods: Mapping[str, Callable[[], None]], rounds: int
) -> dict[str, list[float]]:
    """Wall seconds per method and round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds + 1):
        for name, method in methods.items():
            started = time.perf_counter()
            method()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratios(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median seconds of each method; median, least and largest ratio to the first, by round."""
    base = next(iter(seconds.values()))
    summary = {}
    for name, each in seconds.items():
        to_base = [mine / plain for mine, plain in zip(each, base, strict=True)]
        summary[name] = {
            "seconds": median(each),
            "ratio": median(to_base),
            "least": min(to_base),
            "largest": max(to_base),
        }
    return summary
