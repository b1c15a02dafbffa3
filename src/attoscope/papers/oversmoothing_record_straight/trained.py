"""Trained vision transformers whose value-output maps are held on one side of zero."""

from __future__ import annotations

import numpy as np

from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.digits_evidence import SETTING, figure, last, table, trained
from attoscope.papers.digits_vit import Item
from attoscope.papers.oversmoothing_record_straight._paper import PAPER

FREE, SHARPEN, SMOOTH = "free", "sharpen: in [-1, 0]", "smooth: in [0, 1]"
RECIPES: dict[str, Item] = {
    name: {"treat": {"remedy": "spectral", "mode": mode, "start": "random"}} if mode else {}
    for name, mode in ((FREE, None), (SHARPEN, "sharpen"), (SMOOTH, "smooth"))
}
ABOVE, BELOW = 0.1, 0.2


@PAPER.claim(
    name="trained-spectra",
    statement="A vision transformer whose value-output maps have eigenvalues in [-1, 0] keeps its "
    "patches apart after training; with eigenvalues in [0, 1] they become more alike than in a "
    "free model.",
    source="Sharpening and smoothing parameterisations, trained; here on handwritten digits",
    criterion=f"with every seed the mean cosine is more than {ABOVE} higher with smoothing maps "
    f"than in the free model, and more than {BELOW} lower with sharpening ones ({SETTING})",
)
def trained_spectra(run: Run) -> Evidence:
    found = trained(run, RECIPES)
    free, sharpen, smooth = (last(found, name) for name in (FREE, SHARPEN, SMOOTH))
    # Free models of other seeds, held against the free model as the sharpening one is.
    gaps = np.array([a - b for i, a in enumerate(free) for j, b in enumerate(free) if i != j])
    return Evidence(
        measured={
            "cosine_free": free,
            "cosine_sharpen": sharpen,
            "cosine_smooth": smooth,
            "frequency_ratio_free": last(found, FREE, "frequency_ratio"),
            "frequency_ratio_sharpen": last(found, SHARPEN, "frequency_ratio"),
            "frequency_ratio_smooth": last(found, SMOOTH, "frequency_ratio"),
        },
        holds=bool((smooth - free > ABOVE).all() and (free - sharpen > BELOW).all()),
        control=Control(
            "a free model of another seed in place of the sharpening one",
            {"gaps": gaps},
            fails=bool((gaps <= BELOW).all()),
        ),
        figure=figure(found),
        table=table(found),
    )
