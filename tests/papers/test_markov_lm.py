"""The Markov language model: exact losses, and models that learn it or do not move."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attoscope.papers.markov_lm import (
    LENGTH,
    WORDS,
    bounds,
    build,
    draw,
    successors,
    train,
    treated,
)


def test_exact_losses() -> None:
    exact = bounds()
    assert exact.floor == pytest.approx(0.654, abs=5e-4)
    assert exact.plateau == pytest.approx(2.967, abs=5e-4)


def test_sequences_follow_the_chain_and_have_its_losses() -> None:
    ids = draw(200_000, torch.Generator().manual_seed(0))
    table = successors()
    assert bool((ids[:, 2:, None] == table[ids[:, :-2]]).any(-1).all())
    # What knows the chain, and what knows each position's marginal, on the drawn tokens.
    step = torch.zeros(WORDS, WORDS).scatter_add_(1, table, torch.full((WORDS, 2), 0.5))
    known = -step[ids[:, :-2], ids[:, 2:]].log()
    shares = torch.stack(
        [ids[:, t].bincount(minlength=WORDS) / len(ids) for t in range(LENGTH)]
    )
    marginal = torch.special.entr(shares[2:]).sum(1)
    assert float(known.mean()) == pytest.approx(bounds().floor, abs=2e-3)
    assert float(marginal.mean()) == pytest.approx(bounds().plateau, abs=2e-3)


def test_attention_sees_the_past_alone() -> None:
    model = build(2, "post", 0).eval()
    ids = draw(2, torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, 9:] = (other[:, 9:] + 1) % WORDS
    found, changed = model(ids), model(other)
    torch.testing.assert_close(found[:, :9], changed[:, :9])
    assert not torch.allclose(found[:, 9:], changed[:, 9:])


def test_training_is_repeatable_and_learns() -> None:
    item = {"layers": 1, "norm": "post", "seed": 3, "batch": 8, "steps": 40, "remedy": None}
    first, second = train(item), train(item)
    np.testing.assert_array_equal(first["losses"], second["losses"])
    assert first["losses"][0] > 3.3 and first["score"] < 3.1


@pytest.mark.parametrize(("name", "norm"), [("deepscalelm", "pre"), ("admin", "post")])
def test_remedies_are_in_the_model(name: str, norm: str) -> None:
    item = {"layers": 4, "norm": norm, "seed": 0, "batch": 4, "remedy": (name, {})}
    _, treatment = treated(item)
    assert treatment is not None
    assert (treatment.remedy, treatment.layers) == (name, (8, 8))
