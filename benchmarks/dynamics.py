"""Local convergence, whole: 100 data sets, W and (K, Q), against the published procedure.

    python -m benchmarks.dynamics             the table (about a minute)
    python -m benchmarks.dynamics --json      the same as JSON

Each trains 2,000 normalised steps on n = 6, T = 8, d = 10, reads correlations with the Frobenius
and the nuclear solution and the mean largest probability along the way, and solves both problems
for what is selected at the end: 200 Frobenius and 200 nuclear ones. The published procedure
(`dynamics_official.py`; needs `pip install cvxpy clarabel scs`) reads after every step; it is timed
on two data sets and scaled to 100. Ours is timed with the same readings, and at the 60 steps that
a figure needs. Seconds of the processor, one thread on both sides; ours are medians of three rounds
after one that does not count. Both start from the same weights.
"""

# ruff: noqa: E402
# One thread has to be asked for before numpy is imported.
from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from attoscope.dynamics import AttentionData, Gradient, LinearHead, Normalised, train
from attoscope.svm import AttentionSVM
from attoscope.tasks import stack, unit_sphere
from benchmarks import dynamics_official as official
from benchmarks.svm import show

SEEDS, TIMED, ROUNDS, CHUNK = 100, 2, 3, 50
SIZE, STEPS, LR = (6, 8, 10), 2000, 0.1
READ = {"at 60 steps": None, "after every step": 1}
KINDS = {"W": False, "KQ": True}
# Certified gaps; those of the published procedure come out about the same and are shown.
TOL = {"frobenius": 1e-8, "nuclear": 1e-6}
Clock = dict[str, float]


def problem(seeds: list[int]) -> AttentionData:
    made = stack(unit_sphere(seed, *SIZE) for seed in seeds)
    return AttentionData.cross(made.tokens, made.queries, made.labels, LinearHead(made.head))


def timed(clock: Clock, part: str, run: Callable[[], Any]) -> Any:
    """What it gives; its seconds are added to this part."""
    began = time.process_time()
    result = run()
    clock[part] = clock.get(part, 0.0) + time.process_time() - began
    return result


def ours(seeds: list[int], factored: bool, record: int | None, clock: Clock) -> dict[str, Any]:
    """One parameterisation: curves (norm: (step, trial)), as the published procedure reads them."""
    data = timed(clock, "data", lambda: problem(seeds))
    drawn = [official.starts(seed, SIZE[2], factored)[1] for seed in seeds]
    parts = tuple(np.stack(part) for part in zip(*drawn, strict=True))
    start: dict[str, Any] = {"factors": parts} if factored else {"weight": parts[0]}
    rule = Normalised(LR, log_domain=False)
    run = timed(clock, "training", lambda: train(data, rule, STEPS, record=record, **start))
    out: dict[str, Any] = {"gaps": {}}
    out["probabilities"] = timed(
        clock, "probabilities", lambda: largest_probabilities(data, run.weights)
    )
    chosen = run.selected()
    for norm, tol in TOL.items():
        models = timed(clock, norm, lambda norm=norm, tol=tol: [
            AttentionSVM(norm, tol=tol).fit_selection(data.selection(r, chosen[r]))
            for r in range(data.trials)
        ])  # fmt: skip
        solutions = np.stack([model.weight_ for model in models])
        out[norm] = timed(clock, "correlations", lambda s=solutions: run.correlation(s))
        out["gaps"][norm] = max(model.gap_ for model in models)
    return out


def largest_probabilities(data: AttentionData, weights: np.ndarray) -> np.ndarray:
    """Mean over samples of the largest probability, (step, trial)."""
    slope = Gradient(data)
    out = np.empty(weights.shape[:2])
    for row, weight in zip(out, weights, strict=True):
        slope.attend(weight)
        row[:] = slope.own.mean(1)
    return out


def whole(seeds: list[int], record: int | None) -> tuple[Clock, dict[str, dict[str, Any]]]:
    """All seeds and both parameterisations, in chunks."""
    clock: Clock = {}
    results: dict[str, dict[str, Any]] = {}
    for kind, factored in KINDS.items():
        parts = [
            ours(seeds[k : k + CHUNK], factored, record, clock)
            for k in range(0, len(seeds), CHUNK)
        ]
        results[kind] = {norm: np.concatenate([p[norm] for p in parts], 1) for norm in TOL}
        results[kind]["largest gap"] = {n: max(p["gaps"][n] for p in parts) for n in TOL}
    return clock, results


def published(seeds: list[int]) -> tuple[Clock, dict[str, list[official.Readings]]]:
    """The published procedure on these seeds."""
    clock: Clock = {}
    results: dict[str, list[official.Readings]] = {}
    for kind, factored in KINDS.items():
        results[kind] = [
            official.trial(problem([seed]), seed, factored, STEPS, LR) for seed in seeds
        ]
        for readings in results[kind]:
            for part, took in readings.seconds.items():
                clock[part] = clock.get(part, 0.0) + took
    return clock, results


def measure() -> dict[str, Any]:
    """Both, and how far their curves agree."""
    torch.set_num_threads(1)
    whole(list(range(CHUNK)), None)
    mine: dict[str, Clock] = {}
    for name, record in READ.items():
        rounds = [whole(list(range(SEEDS)), record) for _ in range(ROUNDS)]
        clocks = [clock for clock, _ in rounds]
        total = median(sum(clock.values()) for clock in clocks)
        parts = {part: median(clock[part] for clock in clocks) for part in clocks[0]}
        mine[name] = {"seconds": total, **parts}
    results = rounds[0][1]
    official.trial(problem([SEEDS]), SEEDS, False, 50, LR)
    theirs, curves = published(list(range(TIMED)))
    theirs = {part: took * SEEDS / TIMED for part, took in theirs.items()}
    return {
        **{f"attoscope, read {name}": clock for name, clock in mine.items()},
        "published": {"seconds": sum(theirs.values()), "timed on": TIMED, **theirs},
        "ratio": {
            name: {
                "whole": sum(theirs.values()) / clock["seconds"],
                **{part: theirs[part] / clock[part] for part in theirs},
            }
            for name, clock in mine.items()
        },
        "mean correlation at 1,000 and 2,000 steps": {
            kind: {norm: found[norm][[999, 1999]].mean(1).tolist() for norm in TOL}
            for kind, found in results.items()
        },
        "largest gap": {
            "attoscope": {kind: found["largest gap"] for kind, found in results.items()},
            "published": {
                kind: {norm: max(each.gaps[norm] for each in found) for norm in TOL}
                for kind, found in curves.items()
            },
        },
        "largest difference of curves up to step 1,000": {
            kind: {norm: difference(results[kind], curves[kind], norm) for norm in TOL}
            for kind in KINDS
        },
    }


def difference(found: dict[str, Any], curves: list[official.Readings], norm: str) -> float:
    """Ours against theirs; later, rounding decides where a saturated gradient points."""
    return max(
        float(np.abs(found[norm][:1000, r] - readings.correlations[norm][:1000]).max())
        for r, readings in enumerate(curves)
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    results = measure()
    if chosen.json:
        print(json.dumps(results, indent=1))
    else:
        show(results)


if __name__ == "__main__":
    main()
