"""After training, the factors can be written into the weights of a plain post-norm model."""

from __future__ import annotations

from typing import Any

import altair as alt
import torch
from torch import Tensor, nn

import attoscope
from attoscope.papers.admin_init._paper import PAPER
from attoscope.papers.admin_init._stacks import seeds
from attoscope.papers.base import Control, Evidence, Run

WORDS, WIDTH, HEADS, LAYERS, LENGTH = 20, 16, 4, 3, 9
EXACT = 1e-12


class Encoder(nn.Module):
    """Embeddings with a norm, and post-norm layers; every number of it random."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.double().eval()
        with torch.no_grad():
            for parameter in self.parameters():
                options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
                noise = torch.randn(parameter.shape, **options)
                wide = parameter.dim() > 1
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 if wide else 1 + noise / 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        output: Tensor = self.layers(self.norm(self.words(input_ids)))
        return output


def folded(seed: int) -> dict[str, float]:
    """Largest differences between a model with random factors and the folded plain one."""
    found = {}
    for name, vector in (("vector", True), ("scalar", False)):
        generator = torch.Generator().manual_seed(seed)
        model = Encoder(generator)
        ids = torch.randint(WORDS, (2, LENGTH), generator=generator)
        treatment = attoscope.treat(model, "admin", {"input_ids": ids}, vector=vector)
        with torch.no_grad():
            for omega in treatment.parameters():
                noise = torch.rand(omega.shape, generator=generator, dtype=torch.float64)
                omega.copy_(0.5 + 2 * noise)
            expected = model(ids)
            treatment.fold()
            found[name] = float((model(ids) - expected).abs().max())
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.eps = 1e-5
            found[f"{name}_with_first_eps"] = float((model(ids) - expected).abs().max())
    return found


@PAPER.claim(
    name="factors-fold-away",
    statement="A trained model with Admin's factors is a plain post-norm model with other weights: "
    "the factors can be folded into it exactly.",
    source="Appendix C; the two foldings are derived here",
    criterion="with random weights, gains, biases and factors, in float64, outputs before and "
    f"after folding differ by at most {EXACT:g}: a factor for each feature into the norm before "
    "and the branch's input columns, one number into the branch's last map and the norm's eps",
)
def factors_fold_away(run: Run) -> Evidence:
    results = run.map(folded, seeds(run, quick=5, paper=100), label="foldings")
    worst = {name: max(one[name] for one in results) for name in results[0]}
    least = min(one["scalar_with_first_eps"] for one in results)
    rows = [{"form": name, "difference": one[name]} for one in results for name in one]
    return Evidence(
        measured={name: worst[name] for name in ("vector", "scalar")} | {"seeds": len(results)},
        holds=max(worst["vector"], worst["scalar"]) <= EXACT,
        control=Control(
            "the second folding with the norms' eps left as it was",
            {"least_difference": least},
            fails=least > EXACT,
        ),
        figure=alt.Chart(alt.Data(values=rows), width=400, height=160)
        .mark_tick()
        .encode(
            x=alt.X(
                "difference:Q", title="largest difference", scale=alt.Scale(type="symlog",
                constant=1e-16),
            ),
            y=alt.Y("form:N", title="folding"),
        ),
    )  # fmt: skip
