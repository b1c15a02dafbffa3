"""At equal patches: one loss has no gradient there, the other has one in closed form."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import torch
from torch import Tensor

from attoscope.measures.smoothness import family
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.suppress_oversmoothing._paper import PAPER
from attoscope.remedies.losses import cosine_loss, patch_contrastive_loss

PATCHES, WIDTH = 16, 8
# The losses are means over patches: a step of this length moves each patch by its own gradient.
STEPS, RATE = 100, float(PATCHES)
EXACT, FELT = 1e-14, 1e-3


def at_collapse(seed: int, *, same_early: bool = False) -> dict[str, Any]:
    """Gradients at equal patches, and gradient descent from there, each patch by itself."""
    rng = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": rng, "dtype": torch.float64}
    equal = torch.randn(1, 1, WIDTH, **options).expand(1, PATCHES, WIDTH)
    early = torch.randn(1, PATCHES, WIDTH, **options)
    if same_early:
        early = early[:, :1].expand_as(early)
    losses = {
        "cosine": lambda x: cosine_loss(x),
        "contrastive": lambda x: patch_contrastive_loss(x, early, normalise=False),
    }
    found: dict[str, Any] = {}
    for name, loss in losses.items():
        found[f"gradient_{name}"] = _gradient(loss, equal).abs().max().item()
        path, patches = [_cosine(equal)], equal
        for _ in range(STEPS):
            patches = patches - RATE * _gradient(loss, patches)
            path.append(_cosine(patches))
        found[f"path_{name}"] = np.array(path)
    expected = -(early - early.mean(1, keepdim=True)) / (2 * PATCHES)
    error = (_gradient(losses["contrastive"], equal) - expected).abs().max()
    return found | {"error": error.item()}


@PAPER.claim(
    name="gradient-at-collapse",
    statement="Where all patches are equal the cosine loss has no gradient, so it cannot undo a "
    "collapse; the contrastive loss has the gradient -(e_i - mean e)/(2n), and can.",
    source="derived here from the formulas of the two losses",
    criterion=f"in float64, at equal patches ({PATCHES} of width {WIDTH}), the cosine loss's "
    f"gradient is at most {EXACT:g}, and the contrastive one's is the formula within {EXACT:g} and "
    f"at least {FELT:g} somewhere",
)
def gradient_at_collapse(run: Run) -> Evidence:
    seeds = run.rng("patches").integers(2**31, size=run.pick(quick=3, paper=100)).tolist()
    found = [at_collapse(seed) for seed in seeds]
    control = [at_collapse(seed, same_early=True) for seed in seeds]
    return Evidence(
        measured=_summary(found),
        holds=all(map(_passes, found)),
        control=Control(
            "early patches that are equal too, to which nothing can be tied",
            _summary(control),
            fails=not any(map(_passes, control)),
        ),
        figure=_figure(found[0]),
    )


def _passes(one: dict[str, Any]) -> bool:
    exact = max(one["gradient_cosine"], one["error"]) <= EXACT
    return bool(exact and one["gradient_contrastive"] >= FELT)


def _summary(found: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "largest_gradient_cosine": max(one["gradient_cosine"] for one in found),
        "least_gradient_contrastive": min(one["gradient_contrastive"] for one in found),
        "largest_error_of_formula": max(one["error"] for one in found),
        # Rounding parts them by a hair, which the cosine loss then widens.
        "least_cosine_after_cosine_loss": min(one["path_cosine"][-1] for one in found),
        "largest_cosine_after_contrastive": max(one["path_contrastive"][-1] for one in found),
    }


def _gradient(loss: Any, patches: Tensor) -> Tensor:
    patches = patches.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(patches), patches)
    return gradient


def _cosine(patches: Tensor) -> float:
    return float(family(patches, torch.ones(1, PATCHES, dtype=torch.bool))[0])


def _figure(one: dict[str, Any]) -> Any:
    rows = [
        {"loss": name, "step": step, "cosine": value}
        for name in ("cosine", "contrastive")
        for step, value in enumerate(one[f"path_{name}"].tolist())
    ]
    return (
        alt.Chart(alt.Data(values=rows), width=400, height=260)
        .mark_line()
        .encode(
            x=alt.X("step:Q", title="step of gradient descent on the patches"),
            y=alt.Y("cosine:Q", title="mean cosine of patches"),
            color=alt.Color("loss:N", title="loss"),
        )
    )
