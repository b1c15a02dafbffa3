"""The two regularisation paths have two different limits, known in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np

from attoscope.dynamics import AttentionData, LinearHead, correlation, regularisation_path
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.transformers_as_svms._paper import PAPER

ANGLE = np.pi / 3
RADII = (3, 10, 30, 100, 300)
JUDGED = RADII.index(100)
CROSS = float(np.cos(ANGLE / 2))
# Correlations with the solution of the own norm, from an independent computation.
REPORTED = {
    "W": (0.99773, 0.99923, 0.99990, 0.99999, 0.999999),
    "KQ": (0.99724, 0.99907, 0.99989, 0.99999, 0.999999),
}
# Two queries at 60 degrees, each to select the first of two tokens: (Frobenius, nuclear).
TWO = (
    np.array([[1.0, 0.0], [np.cos(ANGLE), np.sin(ANGLE)]]),
    np.array([[1.0, np.tan(ANGLE / 2)], [1.0, np.tan(ANGLE / 2)]]),
)
# The first of them alone: one solution, of rank one, in both norms.
ONE = (np.array([[1.0, 0.0], [0.0, 0.0]]),) * 2


def path(item: dict[str, Any]) -> dict[str, Any]:
    """Weights along the path, one per radius, with W or its factors on the ball."""
    tokens = np.array([[[[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]]])
    queries = np.array([[[1.0, 0.0], [np.cos(ANGLE), np.sin(ANGLE)]]])
    n = item["samples"]
    head = LinearHead([[1.0, 3.0]])
    data = AttentionData.cross(tokens[:, :n], queries[:, :n], np.ones((1, n)), head)
    found = regularisation_path(data, RADII, factors=item["factors"], seed=item["seed"])
    return {"weights": found.weights[:, 0]}


def measure(run: Run, samples: int, solutions: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Per parameterisation: correlations with both solutions and singular values, per radius."""
    items = [{"samples": samples, "factors": f, "seed": run.seed} for f in (False, True)]
    paths = run.map(path, items, label=f"paths, {samples} samples")
    out = {}
    for name, found, own in zip(("W", "KQ"), paths, (0, 1), strict=True):
        weights = found["weights"]
        out[name] = {
            "own": correlation(weights, solutions[own][None]),
            "cross": correlation(weights, solutions[1 - own][None]),
            "singular": np.linalg.svd(weights, compute_uv=False),
        }
    return out


def met(paths: dict[str, dict[str, Any]]) -> bool:
    """The criterion."""
    return all(
        part["own"][JUDGED] > 0.9999 and abs(part["cross"][JUDGED] - CROSS) <= 0.001
        for part in paths.values()
    )


@PAPER.claim(
    name="regularisation-paths",
    statement=(
        "As its radius grows, the best weight in a ball goes in direction to the Frobenius "
        "solution where W is bounded, and to the nuclear solution, of rank one here, where its "
        "factors K and Q are."
    ),
    source="Theorem on regularisation paths; two queries at 60 degrees, solutions in closed form",
    criterion=(
        "at radius 100, correlation with the own norm's solution above 0.9999, and with the "
        "other norm's cos 30 = 0.8660 within 0.001, for both parameterisations"
    ),
)
def regularisation_paths(run: Run) -> Evidence:
    """Minimisation on the ball, not descent."""
    paths = measure(run, 2, TWO)
    single = measure(run, 1, ONE)
    control = Control(
        what="the first query alone, for which both norms have one solution: the two limits "
        "cannot be told apart",
        measured={f"cross_{name}": part["cross"][JUDGED] for name, part in single.items()},
        fails=not met(single),
    )
    factored = paths["KQ"]["singular"]
    measured = {
        **{f"own_{name}": part["own"][JUDGED] for name, part in paths.items()},
        **{f"cross_{name}": part["cross"][JUDGED] for name, part in paths.items()},
        "second_singular_value_KQ": factored[JUDGED, 1],
        "nuclear_norm_KQ": factored[JUDGED].sum(),
        "reported_cross": CROSS,
    }
    table = [
        {"radius": radius, "parameterisation": name, "own": part["own"][j],
         "cross": part["cross"][j], "reported_own": REPORTED[name][j]}
        for name, part in paths.items()
        for j, radius in enumerate(RADII)
    ]  # fmt: skip
    return Evidence(measured, met(paths), control, figure(table), table)


def figure(table: list[dict[str, Any]]) -> Any:
    """What each path still misses to the solution of either norm, against the radius."""
    import altair as alt

    rows = [
        {
            "radius": row["radius"],
            "off": max(1.0 - row[which], 1e-12),
            "path": "W" if row["parameterisation"] == "W" else "K and Q",
            "solution": said,
        }
        for row in table
        for which, said in (("own", "own norm"), ("cross", "other norm"))
    ]
    return (
        alt.Chart(alt.Data(values=rows), width=420, height=280)
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("radius:Q", title="radius R of the ball").scale(type="log", nice=False),
            y=alt.Y("off:Q", title="1 - correlation").scale(type="log"),
            color=alt.Color("path:N", title="bounded").legend(symbolType="stroke"),
            strokeDash=alt.StrokeDash(
                "solution:N", title="solution of", sort=["own norm"]
            ).legend(symbolType="stroke"),
        )
    )
