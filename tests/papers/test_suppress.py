"""Claims on over-smoothing in trained vision transformers, and the models that they train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attoscope.errors import AttoscopeError
from attoscope.papers import Evidence, Run, digits_evidence, digits_vit
from attoscope.papers.registry import find
from attoscope.papers.suppress_oversmoothing import PAPER, gradients, trained
from attoscope.remedies.tokens import BlockTokens

Patch = pytest.MonkeyPatch


@pytest.fixture
def few_images(monkeypatch: Patch) -> None:
    """An epoch of three steps."""
    data = digits_vit.digits()
    few = digits_vit.Digits(*(x[:300] for x in data))
    monkeypatch.setattr(digits_vit, "digits", lambda: few)


@pytest.fixture(autouse=True)
def nothing_trained_yet() -> Iterator[None]:
    digits_vit._DONE.clear()
    yield
    digits_vit._DONE.clear()


def measure(name: str, run: Run | None = None) -> Evidence:
    (claim,) = PAPER.chosen([name])
    return claim.function(run or Run())


def test_the_registry_finds_the_paper_with_its_claims_in_order() -> None:
    assert find("suppress-oversmoothing").load() is PAPER
    assert [claim.name for claim in PAPER.claims] == [
        "gradient-at-collapse", "cosine-loss", "contrastive-loss", "all-three-losses",
        "each-loss-alone",
    ]  # fmt: skip


# The models.


def test_the_data_are_split_once() -> None:
    data = digits_vit.digits()
    assert data.pixels.shape == (1400, 1, 8, 8) and data.test_pixels.shape == (397, 1, 8, 8)
    assert data.pixels.min() == -1.0 and data.pixels.max() == 1.0
    assert data.test_labels.bincount().min() >= 38


def test_one_epoch_is_the_same_again_and_leaves_the_random_state(few_images: None) -> None:
    before = torch.random.get_rng_state()
    first = digits_vit.train(0, epochs=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(5)
    again, other = digits_vit.train(0, epochs=1), digits_vit.train(1, epochs=1)
    for name in digits_vit.PROFILE:
        assert first.profile[name].shape == (9,)
        assert np.array_equal(first.profile[name], again.profile[name])
        assert not np.array_equal(first.profile[name], other.profile[name])
    assert first.accuracy == again.accuracy > 0.0 and first.step_seconds > 0


def test_the_profile_is_of_the_patches_before_the_final_norm() -> None:
    torch.manual_seed(0)
    model = digits_vit.build()
    profile, _ = digits_vit.measure(model)
    with BlockTokens(model) as tokens, torch.no_grad():
        model(digits_vit.digits().test_pixels)
        pairs = []
        for x in (tokens.first, tokens.last):
            cosines = torch.cosine_similarity(x[:, :, None], x[:, None], dim=-1)
            pairs.append((cosines.sum((1, 2)) - 16).div(16 * 15).mean().item())
    assert profile["cosine"][[1, -1]] == pytest.approx(pairs, abs=1e-5)
    assert sum(p.numel() for p in model.parameters()) == 69_482


def test_equal_seeds_start_from_equal_weights_whatever_is_added() -> None:
    recipes: list[dict[str, Any]] = [
        {}, {"losses": {"cosine": 1.0}}, {"cutmix": True, "losses": {"mixing": 1.0}},
        {"treat": {"remedy": "neutreno"}},
    ]  # fmt: skip
    weights = []
    for recipe in recipes:
        with digits_vit.apart():
            model = digits_vit.Trainer(3, **recipe).model
        state = model.state_dict()
        weights.append({k: v for k, v in state.items() if "attoscope" not in k})
    for other in weights[1:]:
        assert all(torch.equal(other[k], v) for k, v in weights[0].items())


def test_the_classifier_of_patches_is_trained_with_them() -> None:
    data = digits_vit.digits()
    with digits_vit.apart():
        trainer = digits_vit.Trainer(0, cutmix=True, losses={"mixing": 1.0})
        before = trainer.head.weight.detach().clone()
        trainer.step(data.pixels[:20], data.labels[:20])
        assert not torch.equal(before, trainer.head.weight)


@pytest.mark.parametrize("start", ["random", "nearest"])
def test_a_treated_model_stays_within_its_spectrum_as_it_trains(start: str) -> None:
    data = digits_vit.digits()
    with digits_vit.apart():
        treat = {"remedy": "spectral", "mode": "sharpen", "start": start}
        trainer = digits_vit.Trainer(0, treat=treat)
        for _ in range(3):
            trainer.step(data.pixels[:50], data.labels[:50])
        attention = trainer.model.vit.layers[4].attention
        product = (attention.o_proj.weight @ attention.v_proj.weight).detach().double()
    values = torch.linalg.eigvals(product)
    assert values.imag.abs().max() < 1e-5
    assert values.real.max() < 1e-5 and values.real.min() > -1 - 1e-5


def test_bad_recipes_are_refused_in_a_sentence() -> None:
    with pytest.raises(AttoscopeError, match="cosine, contrastive or mixing"):
        digits_vit.train(0, losses={"entropy": 1.0})
    with pytest.raises(AttoscopeError, match="cutmix=True"):
        digits_vit.train(0, losses={"mixing": 1.0})


# The claims.


def known(values: dict[str, list[float]]) -> Any:
    """In place of training: models of these last-block cosines, one per seed."""

    def finished(run: Run, items: list[dict[str, Any]], label: str) -> list[dict[str, Any]]:
        seen: dict[str, int] = {}
        results = []
        for item in items:
            recipe = {k: v for k, v in item.items() if k not in ("seed", "epochs")}
            (name,) = (name for name, one in trained.RECIPES.items() if one == recipe)
            cosine = values[name][seen.setdefault(name, 0)]
            seen[name] += 1
            profile = np.append(np.linspace(0.1, 0.5, 8), cosine)
            results.append({key: profile for key in digits_vit.PROFILE} | {"accuracy": 0.9})
        return results

    return finished


USUAL = {
    trained.PLAIN: [0.5, 0.6], trained.COSINE: [0.2, 0.2], trained.CONTRASTIVE: [0.1, 0.1],
    trained.CUTMIX: [0.5, 0.6], trained.MIXING: [0.8, 0.9], trained.ALL: [0.3, 0.3],
}  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "variant", "missed"),
    [
        ("cosine-loss", trained.COSINE, [0.2, 0.31]),
        ("contrastive-loss", trained.CONTRASTIVE, [0.26, 0.1]),
        ("all-three-losses", trained.ALL, [0.3, 0.43]),
    ],
)
def test_every_seed_counts_and_the_controls_can_pass(
    monkeypatch: Patch, claim: str, variant: str, missed: list[float]
) -> None:
    def judged(**other: list[float]) -> Evidence:
        values = USUAL | {names[k]: v for k, v in other.items()}
        monkeypatch.setattr(digits_evidence, "finished", known(values))
        return measure(claim)

    base = trained.BASELINE[variant]
    names = {"mine": variant, "base": base, "mixing": trained.MIXING}
    found = judged()
    assert found.holds and found.control.fails and found.figure.to_dict()
    assert len(found.table or ()) >= 6
    assert not judged(mine=missed).holds
    assert not judged(base=[0.9, 0.3], mine=[0.1, 0.1]).control.fails
    assert not judged(mixing=[0.1, 0.9]).control.fails


def test_patch_mixing_alone_is_what_breaks_the_claim_of_each_loss(monkeypatch: Patch) -> None:
    monkeypatch.setattr(digits_evidence, "finished", known(USUAL))
    found = measure("each-loss-alone")
    assert not found.holds and found.control.fails
    assert found.measured["ratio mixing loss"] == pytest.approx([1.6, 1.5])
    monkeypatch.setattr(
        digits_evidence, "finished", known(USUAL | {trained.MIXING: [0.2, 0.2]})
    )
    assert measure("each-loss-alone").holds


def test_gradient_at_collapse(monkeypatch: Patch) -> None:
    found = measure("gradient-at-collapse")
    assert found.holds and found.control.fails and found.figure.to_dict()
    assert found.measured["largest_cosine_after_contrastive"] < 0.9
    monkeypatch.setattr(
        gradients, "patch_contrastive_loss", lambda x, e, **_: x.square().mean()
    )
    assert not measure("gradient-at-collapse").holds


def test_a_model_is_trained_once_for_all_claims(monkeypatch: Patch, few_images: None) -> None:
    monkeypatch.setattr(digits_evidence, "QUICK_EPOCHS", 1)
    monkeypatch.setattr(digits_evidence, "QUICK_SEEDS", 1)
    asked: list[int] = []

    class Counting(Run):
        def map(self, function: Any, items: Any, label: str = "items") -> list[Any]:
            todo = list(items)
            asked.append(len(todo))
            return [function(item) for item in todo]

    plain = {trained.PLAIN: {}}
    first = digits_evidence.trained(Counting(), plain)
    again = digits_evidence.trained(Counting(), plain | {"cosine": {"losses": {"cosine": 1.0}}})
    assert asked == [1, 1]
    assert np.array_equal(first[trained.PLAIN]["cosine"], again[trained.PLAIN]["cosine"])
    digits_evidence.trained(Counting(seed=1), plain)
    assert asked == [1, 1, 1]


def test_a_loss_that_is_off_does_not_hold(monkeypatch: Patch, few_images: None) -> None:
    monkeypatch.setattr(digits_evidence, "QUICK_EPOCHS", 1)
    monkeypatch.setattr(digits_vit, "cosine_loss", lambda x: 0.0 * x.sum())
    found = measure("cosine-loss")
    assert found.measured["ratio"] == pytest.approx([1.0, 1.0]) and not found.holds
