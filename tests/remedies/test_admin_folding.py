"""Factors on skips written into the weights of a plain post-norm model, and on disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attoscope
from attoscope import AttoscopeError
from attoscope.remedies.admin import closed_form
from attoscope.trace import Subject
from tests.models import HEADS, WIDTH
from tests.remedies.postnorm import POST_NORM, double, encoder, valid, vary
from tests.remedies.treated import data_of, hooks, output, sized

# Folding.


@pytest.mark.parametrize("name", ["bert", "roberta", "bart", "mpnet"])
def test_a_factor_for_each_feature_folds_into_the_norm_before(name: str) -> None:
    subject, batch = double(name)
    treatment = attoscope.treat(subject.model, "admin", data_of(subject, batch))
    vary(treatment)
    expected = output(subject, batch)
    treatment.fold()
    torch.testing.assert_close(output(subject, batch), expected, rtol=0, atol=1e-12)
    assert hooks(subject.model) == 0 and not treatment.active
    assert not [key for key in subject.model.state_dict() if "attoscope" in key]


@pytest.mark.parametrize("name", [*POST_NORM, "albert"])
def test_one_number_folds_into_the_branch(name: str) -> None:
    subject, batch = double(name)
    options: dict[str, Any] = {"scale": "O(logn)", "vector": False}
    treatment = attoscope.treat(subject.model, "admin", data_of(subject, batch), **options)
    vary(treatment)
    expected = output(subject, batch)
    treatment.fold()
    found = output(subject, batch)
    torch.testing.assert_close(valid(batch, found), valid(batch, expected), rtol=0, atol=1e-12)


def test_the_eps_is_part_of_the_folding() -> None:
    model, x = encoder()
    treatment = attoscope.treat(model, "admin", x, vector=False)
    vary(treatment)
    expected = model(x)
    first_omega: Any = treatment.modules[0].omega
    omega = float(first_omega.detach())
    treatment.fold()
    first: Any = model.layers[0]
    assert first.norm1.eps == pytest.approx(1e-5 / omega**2)
    first.norm1.eps = 1e-5
    assert float((model(x) - expected).detach().abs().max()) > 1e-9


def test_what_cannot_be_folded_is_said_and_nothing_is_changed() -> None:
    model, x = encoder()
    treatment = attoscope.treat(model, "admin", x)
    vary(treatment)
    expected = model(x)
    with pytest.raises(AttoscopeError, match="no norm before this sub-layer"):
        treatment.fold()
    assert torch.equal(model(x), expected) and treatment.active
    with torch.no_grad():
        treatment.modules[0].omega.fill_(0.0)  # type: ignore[operator, union-attr]
    with pytest.raises(AttoscopeError, match="fold: got a factor of 0 at layers.0.norm1"):
        treatment.fold()


def test_a_branch_that_does_not_end_in_a_linear_map_is_not_folded() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x + self.attention(x, x, x, need_weights=False)[0])
            result: Tensor = self.two(x + self.down(self.up(x).relu()).tanh())
            return result

    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()).double(), torch.randn(2, 5, WIDTH).double()
    before = copy.deepcopy(model.state_dict())
    treatment = attoscope.treat(model, "admin", x, scale="O(1)", vector=False)
    with pytest.raises(AttoscopeError, match="expected a branch that ends in a linear map"):
        treatment.fold()
    treatment.undo()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# On disk.


@pytest.mark.parametrize("remedy", ["admin", "deepnet"])
def test_saved_and_loaded(tmp_path: Path, remedy: str) -> None:
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, remedy)
    if remedy == "admin":
        vary(treatment)
    expected = output(subject, batch)
    model: Any = subject.model
    model.save_pretrained(tmp_path)
    loaded = attoscope.load_treated(tmp_path)
    assert torch.equal(output(Subject.of(loaded), batch), expected)
    (held,) = attoscope.remedies.treatments_of(loaded)
    assert held.remedy == remedy and held.layers == (6, 6)
    held.fold()
    torch.testing.assert_close(
        output(Subject.of(loaded), batch), expected, rtol=1e-4, atol=1e-4
    )


def test_fixed_factors_stay_exact_in_half_precision(tmp_path: Path) -> None:
    subject, _ = sized("bert")
    treatment = attoscope.treat(
        subject.model, "admin", scale="O(logn)", vector=False, trainable=False
    )
    subject.model.to(torch.bfloat16)
    model: Any = subject.model
    model.save_pretrained(tmp_path)
    (held,) = attoscope.remedies.treatments_of(attoscope.load_treated(tmp_path))
    for each in (treatment, held):
        for module in each.modules:
            assert float(module.omega) == pytest.approx(closed_form(6), rel=1e-7)  # type: ignore[arg-type]
