"""Training: 12 post-norm layers without warm-up, plain and with Admin."""

from __future__ import annotations

import numpy as np

from attoscope.papers.admin_init._paper import PAPER
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.markov_evidence import figure, measured, scores, sizes, table, trained
from attoscope.papers.markov_lm import SETTING, Item

QUICK_STEPS = 320
LAYERS, FEW, STUCK, LEARNT, ALIKE = 12, 2, 2.8, 1.2, 0.1
PROFILED = ("admin", {"scale": "profile"})
CLOSED = ("admin", {"scale": "O(logn)"})
POST, PRE, ADMIN, ADMIN_CLOSED = (
    "Post-LN", "Pre-LN", "Admin, profiled", "Admin, closed form"
)  # fmt: skip
RECIPES: dict[str, Item] = {
    POST: {"layers": LAYERS, "norm": "post"},
    PRE: {"layers": LAYERS, "norm": "pre"},
    ADMIN: {"layers": LAYERS, "norm": "post", "remedy": PROFILED},
    ADMIN_CLOSED: {"layers": LAYERS, "norm": "post", "remedy": CLOSED},
}
SHALLOW_POST, SHALLOW_ADMIN = f"Post-LN, {FEW} layers", f"Admin, profiled, {FEW} layers"
SHALLOW: dict[str, Item] = {
    SHALLOW_POST: {"layers": FEW, "norm": "post"},
    SHALLOW_ADMIN: {"layers": FEW, "norm": "post", "remedy": PROFILED},
}


@PAPER.claim(
    name="deep-post-norm-trains",
    statement="A deep Post-LN model that does not train without warm-up does with Admin, as Pre-LN "
    "does.",
    source="The comparison of 18-layer models for translation; here in miniature",
    criterion=f"with every seed {LAYERS} layers of Post-LN end above {STUCK}, those with Admin "
    f"(profiled and closed form; only the closed form in a quick run) and, at paper scale, Pre-LN "
    f"below {LEARNT} ({SETTING}; {sizes(QUICK_STEPS)})",
)
def deep_post_norm_trains(run: Run) -> Evidence:
    chosen = run.pick(quick=(POST, ADMIN_CLOSED), paper=tuple(RECIPES))
    found = trained(
        run, {name: RECIPES[name] for name in chosen} | SHALLOW, quick_steps=QUICK_STEPS
    )
    post, admin = scores(found, SHALLOW_POST), scores(found, SHALLOW_ADMIN)
    gap = np.abs(post - admin)
    return Evidence(
        measured=measured(found),
        holds=bool((scores(found, POST) > STUCK).all())
        and all((scores(found, name) < LEARNT).all() for name in chosen if name != POST),
        control=Control(
            f"{FEW} layers in place of {LAYERS}, where plain Post-LN trains as well (gap below "
            f"{ALIKE})",
            {"gap": gap, "loss_post": post, "loss_admin": admin},
            fails=bool((post <= STUCK).all() and (gap < ALIKE).all()),
        ),
        figure=figure(found),
        table=table(found),
    )
