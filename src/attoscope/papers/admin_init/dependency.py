"""Which share of a sub-layer's output is its own branch, along six untrained layers."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.papers.admin_init._paper import PAPER
from attoscope.papers.admin_init._stacks import ADMIN, POST, PRE, Variant, seeds, stack
from attoscope.papers.base import Control, Evidence, Run
from attoscope.prediction.dependency import gather, given, residual_dependency

Array = NDArray[np.float64]
SUBLAYERS = 12
HELD, LOST, CLOSE = 0.9, 0.7, 0.04
VARIANTS = (POST, PRE, ADMIN)


def shares(item: dict[str, Any]) -> dict[str, Array]:
    """Own shares of one stack, and what the variances of x_0 and the branches predict for a
    pre-norm one."""
    subject, x = stack(item["variant"], SUBLAYERS, item["seed"])
    (found,) = residual_dependency(subject, x)
    subject, batch = given(subject, x)
    (rows,) = gather(subject, batch, tokens=256).values()
    variances = [float(rows[0].before.var(-1).mean())]
    variances += [float(one.branch.var(-1).mean()) for one in rows]
    total = np.cumsum(variances)
    return {"own": found.own.numpy(), "predicted": np.sqrt(variances[1:] / total[1:])}


@PAPER.claim(
    name="own-share-along-depth",
    statement="At the start every sub-layer of a Post-LN model depends on its own branch as much "
    "as the first does; in Pre-LN the dependency falls with depth, as the variances of the "
    "branches predict.",
    source="The dependency map of untrained 6-layer models",
    criterion="own share of the last MLP over that of the first: at least "
    f"{HELD} for Post-LN and at most {LOST} for Pre-LN; Pre-LN's own shares are "
    f"sqrt(V_i / sum V_k) within {CLOSE:.0%} (means over seeds, {SUBLAYERS} sub-layers)",
)
def own_share_along_depth(run: Run) -> Evidence:
    drawn = seeds(run, quick=8, paper=32)
    found = {variant: _means(run, variant, drawn) for variant in VARIANTS}
    own = {variant.name: each["own"] for variant, each in found.items()}
    kept = {name: float(each[-1] / each[1]) for name, each in own.items()}
    error = float(np.abs(own[PRE.name] / found[PRE]["predicted"] - 1).max())
    return Evidence(
        measured={
            "last_over_first_mlp": kept, "largest_error_of_prediction": error, "own_share": own,
            "seeds": len(drawn),
        },
        holds=kept[POST.name] >= HELD and kept[PRE.name] <= LOST and error <= CLOSE,
        control=Control(
            "Post-LN with profiled Admin, which must fall as Pre-LN does",
            {"last_over_first_mlp": kept[ADMIN.name]},
            fails=kept[ADMIN.name] < HELD and kept[ADMIN.name] <= LOST,
        ),
        figure=_figure(own),
        table=[
            {"sub_layer": i + 1, "branch": "mlp" if i % 2 else "attention"}
            | {name: float(each[i]) for name, each in own.items()}
            for i in range(SUBLAYERS)
        ],
    )  # fmt: skip


def _means(run: Run, variant: Variant, drawn: list[int]) -> dict[str, Array]:
    items = [{"variant": variant.name, "seed": seed} for seed in drawn]
    results = run.map(shares, items, label="dependency maps")
    return {name: np.mean([one[name] for one in results], 0) for name in results[0]}


def _figure(own: dict[str, Array]) -> Any:
    rows = [
        {
            "model": name,
            "sub-layer": i + 1,
            "share": value,
            "branch": ("attention", "MLP")[i % 2],
        }
        for name, each in own.items()
        for i, value in enumerate(each.tolist())
    ]
    return (
        alt.Chart(alt.Data(values=rows), width=400, height=280)
        .mark_line(point=True)
        .encode(
            x=alt.X("sub-layer:Q"),
            y=alt.Y("share:Q", title="own share of the output (standard deviations)"),
            color=alt.Color("model:N", title="model", sort=list(own)),
            strokeDash=alt.StrokeDash("branch:N", title="branch"),
        )
    )
