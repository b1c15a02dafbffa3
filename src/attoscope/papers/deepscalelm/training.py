"""Training: 12 post-norm layers without warm-up, with Xavier weights and with DeepScaleLM."""

from __future__ import annotations

from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.deepscalelm._paper import PAPER
from attoscope.papers.markov_evidence import figure, measured, scores, sizes, table, trained
from attoscope.papers.markov_lm import SETTING, Item

QUICK_STEPS = 420
LAYERS, FEW, STUCK, LEARNT = 12, 2, 2.8, 1.3
DEEPSCALE = ("deepscalelm", {"count": "layers", "r0": 0.221})
POST, SCALED_POST, SCALED_PRE, PRE = (
    "Xavier Post-LN", "DeepScaleLM Post-LN", "DeepScaleLM Pre-LN", "Xavier Pre-LN"
)  # fmt: skip
RECIPES: dict[str, Item] = {
    POST: {"layers": LAYERS, "norm": "post"},
    SCALED_POST: {"layers": LAYERS, "norm": "post", "remedy": DEEPSCALE},
    SCALED_PRE: {"layers": LAYERS, "norm": "pre", "remedy": DEEPSCALE},
    PRE: {"layers": LAYERS, "norm": "pre"},
}
SHALLOW = f"Xavier Post-LN, {FEW} layers"


@PAPER.claim(
    name="deep-post-norm-trains",
    statement="A deep Post-LN model that does not train with Xavier weights does with DeepScaleLM, "
    "without warm-up.",
    source="The models of up to 1000 layers; here in miniature",
    criterion=f"with every seed {LAYERS} layers of Post-LN end above {STUCK} with Xavier weights "
    f"and below {LEARNT} with DeepScaleLM (beta^2 = 2/{LAYERS}); at paper scale Pre-LN with "
    "DeepScaleLM does as well, and nothing is claimed against Pre-LN with Xavier weights "
    f"({SETTING}; {sizes(QUICK_STEPS)})",
)
def deep_post_norm_trains(run: Run) -> Evidence:
    chosen = run.pick(quick=(POST, SCALED_POST), paper=tuple(RECIPES))
    few = {SHALLOW: {"layers": FEW, "norm": "post"}}
    found = trained(
        run, {name: RECIPES[name] for name in chosen} | few, quick_steps=QUICK_STEPS
    )
    learnt = [scores(found, name) for name in chosen if name in (SCALED_POST, SCALED_PRE)]
    shallow = scores(found, SHALLOW)
    return Evidence(
        measured=measured(found),
        holds=bool((scores(found, POST) > STUCK).all())
        and all((own < LEARNT).all() for own in learnt),
        control=Control(
            f"{FEW} layers in place of {LAYERS}, of which Xavier weights train as well",
            {"loss": shallow},
            fails=bool((shallow <= STUCK).all()),
        ),
        figure=figure(found),
        table=table(found),
    )
