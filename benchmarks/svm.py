"""The attention SVM against its peers, on one thread, at equal certified gap.

    python -m benchmarks.svm                  the table (about five minutes)
    python -m benchmarks.svm --json           the same as JSON
    python -m benchmarks.svm --only small     first, small, middle, hard, heads, large or growth
    python -m benchmarks.svm --only growth --plot docs/svm-growth.svg

Medians of processor seconds on one thread; ratios are of medians of one run. Peers need
`pip install cvxpy clarabel scs`. The unit "evaluations" is the time of one evaluation of all
margins, `Selection.margins`: BLAS products and a subtraction, on the same machine at that time.
"""

# ruff: noqa: E402
# One thread has to be asked for before numpy is imported.
from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from attoscope.svm import AttentionSVM, InfeasibleSelection, Selection, certify, fit_many
from benchmarks import svm_cases as cases
from benchmarks import svm_peers as peers

warnings.filterwarnings("ignore")
# Linux: forget the highest memory so far; then read how much is held, and the highest since.
MEMORY = (
    "def forget(): open('/proc/self/clear_refs', 'w').write('5')\n"
    "def held(what):\n"
    "    lines = open('/proc/self/status').read().splitlines()\n"
    "    return int([x for x in lines if x.startswith(what)][0].split()[1]) * 1024\n"
)
PARTS = ("first", "small", "middle", "hard", "heads", "large", "growth")


def seconds(run: Callable[[], Any], rounds: int = 5) -> float:
    """Median seconds of the processor; one round that does not count, where a round is short.

    On one thread that is the wall time of an idle machine, and others' work adds little to it.
    """
    taken = []
    for turn in range(rounds + (rounds > 1)):
        began = time.process_time()
        run()
        if turn or rounds == 1:
            taken.append(time.process_time() - began)
    return median(taken)


def ours(selection: Selection, norm: str, tol: float, **options: Any) -> AttentionSVM:
    return AttentionSVM(norm, tol=tol, **options).fit_selection(selection)


def gap_of(selection: Selection, norm: str, weight: Any, lower: float) -> float:
    """Certified relative gap of anybody's weight, from a lower bound that holds for all."""
    if weight is None:
        return float("inf")
    return (
        certify(selection, weight, np.zeros(selection.selected.shape), norm).upper / lower - 1
    )


def least(
    make: Callable[[float], Any],
    settings: list[float],
    reach: Callable[[Any], float],
    goal: float,
) -> tuple[float, float]:
    """Seconds and gap of the loosest setting that reaches the goal (else of the tightest)."""
    took, gap = float("nan"), float("inf")
    for setting in settings:
        began = time.process_time()
        weight = make(setting)
        took, gap = time.process_time() - began, reach(weight)
        if gap <= goal:
            break
    return took, gap


def evaluation(selection: Selection) -> float:
    """Seconds of one evaluation of all margins."""
    weight = np.random.default_rng(1).standard_normal(selection.shape[2:])
    return seconds(lambda: selection.margins(weight), 25)


def first() -> dict[str, Any]:
    """A fresh interpreter with an empty kernel cache, and again with the cache filled."""
    import tempfile

    script = (
        "import time; t = time.perf_counter()\n"
        "from benchmarks.svm_cases import unit\n"
        "from attoscope.svm import AttentionSVM\n"
        "s = unit(30, 16, 32); i = time.perf_counter() - t; out = [i]\n"
        "for norm in ('frobenius', 'nuclear', 'frobenius', 'nuclear'):\n"
        "    t = time.perf_counter(); AttentionSVM(norm, tol=1e-6).fit_selection(s)\n"
        "    out.append(time.perf_counter() - t)\n"
        "print(*out)"
    )
    rows = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty cache", "filled cache"):
            done = subprocess.run(
                [sys.executable, "-c", script], capture_output=True, text=True, check=True,
                env={**os.environ, "NUMBA_CACHE_DIR": cache},
            )  # fmt: skip
            names = ("import", "frobenius first", "nuclear first", "frobenius", "nuclear")
            rows[name] = dict(zip(names, map(float, done.stdout.split()), strict=True))
    return rows


def small() -> dict[str, Any]:
    """30 queries, 16 tokens, width 32: every peer can take part."""
    s = cases.unit(30, 16, 32)
    rows: dict[str, Any] = {}
    for norm, goal in (("frobenius", 1e-8), ("nuclear", 1e-6)):
        lower = ours(s, norm, 1e-10).lower_bound_

        def reach(weight: Any, norm: str = norm, lower: float = lower) -> float:
            return gap_of(s, norm, weight, lower)

        model = ours(s, norm, goal)
        table = {"attoscope": (seconds(lambda n=norm, g=goal: ours(s, n, g), 25), model.gap_)}
        if norm == "frobenius":
            table["scipy NNLS"] = (
                seconds(lambda: peers.scipy_nnls(s)),
                reach(peers.scipy_nnls(s)),
            )
            table["liblinear"] = least(
                lambda tol: peers.liblinear(s, tol),
                [10.0**-k for k in range(4, 13)],
                reach,
                goal,
            )
            table["Clarabel, dual"] = (
                seconds(lambda: peers.clarabel_dual(s)), reach(peers.clarabel_dual(s)),
            )  # fmt: skip
        else:
            table["SCS"] = least(
                lambda eps: peers.scs_nuclear(s, eps),
                [10.0**-k for k in range(5, 10)],
                reach,
                goal,
            )
        took = time.process_time()
        weight = peers.official(s, norm)
        table["cvxpy, official code"] = (time.process_time() - took, reach(weight))
        rows[norm] = compared(table, goal, evaluation(s))
    return rows


def compared(
    table: dict[str, tuple[float, float]], goal: float, one: float | None = None
) -> dict[str, Any]:
    own = table["attoscope"][0]
    out: dict[str, Any] = {
        name: {"seconds": took, "gap": gap, "ratio": took / own, "reached": bool(gap <= goal)}
        for name, (took, gap) in table.items()
    }
    if one is not None:
        out["attoscope"]["evaluations"] = own / one
        out["attoscope"]["evaluation_seconds"] = one
    return out


def middle() -> dict[str, Any]:
    """200 queries, 64 tokens, width 128: 12,600 constraints on 16,384 numbers."""
    s = cases.unit(200, 64, 128)
    one = evaluation(s)
    rows = {}
    for norm, goal in (("frobenius", 1e-8), ("nuclear", 1e-6)):
        model = ours(s, norm, goal)
        table = {"attoscope": (seconds(lambda n=norm, g=goal: ours(s, n, g), 9), model.gap_)}
        if norm == "frobenius":
            lower = ours(s, norm, 1e-10).lower_bound_
            table["liblinear"] = least(
                lambda tol: peers.liblinear(s, tol),
                [10.0**-k for k in range(3, 10)],
                lambda w, lower=lower: gap_of(s, "frobenius", w, lower),
                goal,
            )
        rows[norm] = compared(table, goal, one)
    return rows


def hard() -> dict[str, Any]:
    """500 queries, 128 tokens, width 64: 63,500 constraints on 4,096 numbers."""
    s, goal = cases.unit(500, 128, 64), 1e-6
    model = ours(s, "frobenius", goal)
    plain = plain_descent(s, goal)
    table = {
        "attoscope": (seconds(lambda: ours(s, "frobenius", goal), 5), model.gap_),
        "dual coordinate descent, no shrinking": plain[:2],
    }
    out = compared(table, goal, evaluation(s))
    out["dual coordinate descent, no shrinking"]["sweeps"] = plain[2]
    return {"frobenius": out}


def plain_descent(selection: Selection, goal: float) -> tuple[float, float, int]:
    """Our own kernel as plain dual coordinate descent: every constraint, every sweep."""
    from attoscope.svm._problem import Problem
    from attoscope.svm._project import Projector
    from attoscope.svm._solve import Frobenius

    solver = Frobenius(Problem.of(selection), np.inf)
    projector: Projector = solver.projector
    projector._few = True
    began = time.process_time()
    projector.begin()
    sweeps, gap = 0, float("inf")
    while gap > goal and sweeps < 20_000:
        projector.sweep(25, inner=1)
        sweeps += 25
        projector.look(-np.inf, 0, keep=True)
        gap = solver.gap()
    return time.process_time() - began, gap, sweeps


def heads() -> dict[str, Any]:
    """All 72 heads of MiniLM, 512 queries each, up to 128 keys, on all cores."""
    rows = {}
    for space in ("head", "stream"):
        problems = cases.minilm(space)
        model = AttentionSVM(tol=1e-3, time_limit=30.0)
        fit_many(problems[:2], model, n_jobs=-1)
        began = time.perf_counter()
        results = fit_many(problems, model, n_jobs=-1)
        took = time.perf_counter() - began
        gaps = [r.gap_ if isinstance(r, AttentionSVM) else float("nan") for r in results]
        infeasible = [r for r in results if isinstance(r, InfeasibleSelection)]
        rows[space] = {
            "heads": len(results), "seconds": took, "cores": os.cpu_count(),
            "share at 1e-3": float(np.mean([g <= 1e-3 for g in gaps])),
            "infeasible, proved": sum(p.verify() for p in infeasible),
            "largest gap": float(np.nanmax(gaps)), "constraints": problems[0].constraint_count,
        }  # fmt: skip
    return rows


def large() -> dict[str, Any]:
    """One head of a 7B model's width: wall time of one thread, in an interpreter of its own."""
    script = (
        "import time, warnings; warnings.simplefilter('ignore')\n"
        "from benchmarks.svm_cases import planted, unit\n"
        "from attoscope.svm import AttentionSVM\n"
        "AttentionSVM(tol=1e-3).fit_selection(planted(200, 256, 16))\n"
        "s = planted(10_000, 4096, 128)\n"
        "forget(); before, t = held('VmRSS'), time.perf_counter()\n"
        "m = AttentionSVM(tol=1e-3, time_limit=300).fit_selection(s)\n"
        "print(time.perf_counter() - t, m.gap_, m.objective_, m.n_iter_, s.nbytes,"
        " held('VmHWM') - before, s.constraint_count)"
    )
    done = subprocess.run(
        [sys.executable, "-c", MEMORY + script], capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = (
        "seconds",
        "gap",
        "objective",
        "passes",
        "data bytes",
        "extra bytes",
        "constraints",
    )
    return dict(zip(names, map(float, done.stdout.split()), strict=True))


def growth() -> dict[str, Any]:
    """Time and memory against n, T and d, each doubled four times."""
    rows = {}
    for which, start in (("n", (50, 32, 96)), ("T", (100, 16, 64)), ("d", (100, 32, 32))):
        points = []
        for k in range(5):
            size = list(start)
            size["nTd".index(which)] *= 2**k
            s = cases.unit(*size)
            took = seconds(lambda s=s: ours(s, "frobenius", 1e-6), 5)
            points.append({"size": size, "seconds": took, "memory": memory(size)})
        logs = np.log([p["seconds"] for p in points])
        sizes = np.log([p["size"]["nTd".index(which)] for p in points])
        rows[which] = {"points": points, "exponent": float(np.polyfit(sizes, logs, 1)[0])}
    return rows


def memory(size: list[int]) -> float:
    """Peak bytes that a fit takes beyond the data, over the data's bytes."""
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from benchmarks.svm_cases import unit\n"
        "from attoscope.svm import AttentionSVM\n"
        f"s = unit(*{size}); AttentionSVM().fit_selection(unit(60, 16, 12))\n"
        "forget(); a = held('VmRSS'); AttentionSVM().fit_selection(s)\n"
        "print((held('VmHWM') - a) / s.nbytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", MEMORY + script], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part of it")
    parser.add_argument("--plot", metavar="FILE", help="draw growth as SVG or PNG")
    chosen = parser.parse_args(arguments)
    results = {}
    for part in chosen.only or PARTS:
        results[part] = globals()[part]()
        if not chosen.json:
            print(f"\n{part}: {globals()[part].__doc__.splitlines()[0]}")
            show(results[part])
    if chosen.json:
        print(json.dumps(results, indent=1))
    if chosen.plot:
        draw(results["growth"], chosen.plot)


def draw(rows: dict[str, Any], path: str) -> None:
    """Time against each size, both on logarithmic axes, with the fitted exponent."""
    import altair as alt

    points = [
        {
            "size": point["size"]["nTd".index(which)],
            "seconds": point["seconds"],
            "doubled": f"{which}: time grows as {which}^{row['exponent']:.2f}",
        }
        for which, row in rows.items()
        for point in row["points"]
    ]
    chart = alt.Chart(alt.Data(values=points), width=420, height=260).mark_line(point=True)
    chart.encode(
        x=alt.X("size:Q", scale=alt.Scale(type="log"), title="size of what is doubled"),
        y=alt.Y("seconds:Q", scale=alt.Scale(type="log"), title="seconds, gap 1e-6"),
        color=alt.Color("doubled:N", title=None),
    ).save(path)


def show(value: Any, depth: int = 1) -> None:
    for name, inner in value.items():
        if isinstance(inner, dict) and any(isinstance(v, dict) for v in inner.values()):
            print("  " * depth + str(name))
            show(inner, depth + 1)
        elif isinstance(inner, dict):
            line = ", ".join(f"{k} {shown(v)}" for k, v in inner.items())
            print("  " * depth + f"{name}: {line}")
        else:
            print("  " * depth + f"{name}: {shown(inner)}")


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
