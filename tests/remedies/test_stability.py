"""How strong a pull a model's attention bears."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attoscope
from attoscope.remedies import stability
from attoscope.remedies.functional import stability_limit
from tests.remedies.treated import data_of, read, sized


class Fixed(nn.Module):
    """One head whose attention is given: scores are its logarithm."""

    def __init__(self, attention: Tensor) -> None:
        super().__init__()
        self.v, self.o = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scores = nn.Buffer(attention.log())

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x)[:, None]
        q = torch.zeros_like(v)
        heads = nn.functional.scaled_dot_product_attention(q, q, v, attn_mask=self.scores)
        return x + self.o(heads[:, 0])


def test_known_limits() -> None:
    """Eigenvalues 1 and -0.6, then 1 and 0.5: limits 0.4 and 1.5."""
    away = torch.tensor([[0.2, 0.8], [0.8, 0.2]])
    own = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    model, x = nn.Sequential(Fixed(away), Fixed(own)), torch.randn(1, 2, 2)
    found = stability(model, x)
    assert {site: round(float(limit), 5) for site, limit in found.items()} == {
        "encoder.0": 0.4,
        "encoder.1": 1.5,
    }
    noted = attoscope.treat(model, "neutreno", x, strength=0.6)
    assert any("above the stability limit of 1 of 2 heads" in note for note in noted.notes)
    noted.undo()
    quiet = attoscope.treat(model, "neutreno", x, strength=0.3)
    assert not any("stability" in note for note in quiet.notes)


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_every_site_and_head_of_a_model(name: str) -> None:
    subject, batch = sized(name)
    found = stability(subject, batch)
    assert len(found) == 3
    treatment = attoscope.treat(subject.model, "centred", data_of(subject, batch), strength=0.0)
    for limit, call in zip(found.values(), read(subject, batch, treatment), strict=True):
        expected = []
        # The longest two of a batch; of images, all of one length, the first two.
        for document in (0, 1) if name == "vit" else (0, 2):
            keep = call.valid[document].nonzero()[:, 0]
            expected.append(stability_limit(call.weights[document][:, keep][:, :, keep]))
        torch.testing.assert_close(limit, torch.stack(expected).amin(0), rtol=0, atol=1e-5)
