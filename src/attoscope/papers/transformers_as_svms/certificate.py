"""How near training is to the max-margin weight, bounded from its gradients without a solver."""

from __future__ import annotations

from typing import Any

import numpy as np

from attoscope.dynamics import (
    Gradient,
    Normalised,
    Trajectory,
    train,
    training_certificate,
)
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.transformers_as_svms._paper import PAPER
from attoscope.papers.transformers_as_svms._setting import (
    default_start,
    instance_seeds,
    joined,
    parts,
    solve,
    unit_sphere_data,
)

SIZE = (6, 8, 10)
JUDGED, LAST, FACTORED = 10_000, 30_000, 6_000
SHOWN = (100, 1000, 3000, 10_000, 30_000)
# Medians over 20 data sets of an independent computation, at the steps shown.
REPORTED: dict[str, tuple[float, ...]] = {
    "lower": (0.821, 0.9994, 0.99998, 1.0, 1.0),
    "upper": (np.inf, 1.104, 1.027, 1.0074, 1.0024),
    "correlation": (0.742, 0.9954, 0.9994, 0.99994, 0.99999),
}
# Relative rounding that a bound may be off by.
ROUNDING = 1e-9
Bounds = dict[str, Any]


def recorded(steps: int) -> list[int]:
    """The steps shown, and some between them."""
    between = np.geomspace(10, steps, 25).round().astype(int).tolist()
    return sorted({*(s for s in SHOWN if s <= steps), *between})


def bounded(item: dict[str, Any]) -> Bounds:
    """Bounds (record, trial) along training, over the optimum of the selection that it ends at."""
    kind, steps, seeds = item["kind"], item["steps"], item["seeds"]
    data = unit_sphere_data(seeds, *SIZE)
    rule = Normalised(0.1, log_domain=kind != "plain")
    factors = None
    if kind == "factors":
        factors = (default_start(seeds, SIZE[2], 0), default_start(seeds, SIZE[2], 1))
    run = train(data, rule, steps, factors=factors, record=recorded(steps))
    norm = "frobenius" if factors is None else "nuclear"
    models = [solve(run.selection(k), norm) for k in range(data.trials)]
    most = np.array([model.objective_ for model in models])
    least = np.array([model.lower_bound_ for model in models])
    lower, upper = plain_bounds(run) if kind == "plain" else run.certificate(norm)
    valid = (lower <= most * (1 + ROUNDING)) & (upper >= least * (1 - ROUNDING))
    out = {
        "steps": run.steps, "lower": lower / most, "upper": upper / most, "valid": valid,
        "gap": upper / np.where(lower > 0.0, lower, np.nan) - 1.0,
        "correlation": run.correlation(np.stack([model.weight_ for model in models])),
    }  # fmt: skip
    if kind == "factors":
        out["last_gradient"] = run.certificate(norm, window=0)[0] / most
    return out


def plain_bounds(run: Trajectory) -> tuple[Any, Any]:
    """(lower, upper) from gradients as back-propagation computes them, digits lost and all."""
    slope, selected = Gradient(run.data, log_domain=False), run.selected()
    out = np.empty((2, *run.weights.shape[:2]))
    for k, weights in enumerate(run.weights):
        coefficients = slope.at(weights).coefficients
        for r, weight in enumerate(weights):
            selection = run.data.selection(r, selected[r])
            found = training_certificate(selection, weight, coefficients[r])
            out[:, k, r] = found.lower, found.upper
    return out[0], out[1]


def measure(run: Run, kind: str, steps: int) -> Bounds:
    """The bounds of all trials side by side, and medians over them."""
    seeds = instance_seeds(run, run.pick(quick=20, paper=100))
    items = [{"kind": kind, "steps": steps, "seeds": part} for part in parts(seeds, 10)]
    found = run.map(bounded, items, label=f"certificates, {kind}")
    steps_of = found[0].pop("steps")
    return {name: joined(found, name) for name in found[0]} | {"steps": steps_of}


def median(bounds: Bounds, name: str, step: int) -> float:
    """Median over trials at a recorded step."""
    at = int(np.searchsorted(bounds["steps"], step))
    return float(np.median(bounds[name][at]))


def met(bounds: Bounds) -> bool:
    """The criterion."""
    gap = median(bounds, "gap", JUDGED)  # NaN where there is no lower bound
    return bool(bounds["valid"].all()) and gap < 0.03


@PAPER.claim(
    name="certificate-without-solver",
    statement=(
        "Minus the gradient is a combination of the SVM's constraints with multipliers that are "
        "known: weight and gradient bound the SVM's optimum from both sides, without a solver, "
        "and the bounds close as training goes on."
    ),
    source="Derived from the gradient of the training objective; weak duality",
    criterion=(
        "lower bound <= optimum <= upper bound at all recorded steps, for W and for K and Q; "
        "median gap between the bounds below 3 % after 10,000 steps on W"
    ),
)
def certificate_without_solver(run: Run) -> Evidence:
    """W trained in the log domain, factors likewise, and W in plain double arithmetic."""
    bounds = measure(run, "weight", LAST)
    factored = measure(run, "factors", FACTORED)
    plain = measure(run, "plain", JUDGED)
    control = Control(
        what="gradients in plain double arithmetic, whose digits cancel",
        measured={name: median(plain, name, JUDGED) for name in ("lower", "upper", "gap")},
        fails=not met(plain),
    )
    at = int(np.searchsorted(bounds["steps"], JUDGED))
    measured = {
        "all_valid": bool(bounds["valid"].all() and factored["valid"].all()),
        "median_gap": median(bounds, "gap", JUDGED),
        "largest_gap": float(bounds["gap"][at].max()),
        "factors_upper": median(factored, "upper", FACTORED),
        "factors_lower": median(factored, "lower", FACTORED),
        "factors_lower_range": [factored["lower"][-1].min(), factored["lower"][-1].max()],
        "factors_lower_of_last_gradient": median(factored, "last_gradient", FACTORED),
        "reported_factors": {
            "upper": 1.0036,
            "lower_range": [0.94, 0.97],
            "last_gradient": 0.18,
        },
    }
    table = [
        {"step": step}
        | {name: median(bounds, name, step) for name in REPORTED}
        | {f"reported_{name}": values[j] for name, values in REPORTED.items()}
        for j, step in enumerate(SHOWN)
    ]
    holds = met(bounds) and bool(factored["valid"].all())
    return Evidence(measured, holds, control, figure(bounds, plain), table)


def figure(bounds: Bounds, plain: Bounds) -> Any:
    """Both bounds over the optimum against steps, with and without cancellation."""
    import altair as alt

    rows: list[dict[str, Any]] = [
        {"step": int(step), "bound": median(found, which, int(step)), "of": f"{which} bound",
         "gradient": said}
        for found, said in ((bounds, "log domain"), (plain, "plain double"))
        for step in found["steps"]
        for which in ("lower", "upper")
    ]  # fmt: skip
    shown = [row for row in rows if 0.6 <= row["bound"] <= 1.5]
    return (
        alt.Chart(alt.Data(values=shown), width=440, height=280)
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("step:Q", title="training steps").scale(type="log", nice=False),
            y=alt.Y("bound:Q", title="bound / optimum, median").scale(zero=False),
            color=alt.Color("of:N", title="bound").legend(symbolType="stroke"),
            strokeDash=alt.StrokeDash("gradient:N", title="gradients").legend(
                symbolType="stroke"
            ),
        )
    )
