"""CutMix on the patch grid and the losses that come with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.mixing import (
    MixedBatch,
    cutmix_on_patch_grid,
    patch_mixing_loss,
    region_mixing_loss,
)


def numbered(batch: int = 6, rows: int = 3, columns: int = 4, size: int = 2) -> Tensor:
    """Images whose pixels say which image and which patch they belong to."""
    patch = torch.arange(rows * columns).reshape(rows, columns)
    pixels = patch.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return (100.0 * torch.arange(batch)[:, None, None, None] + pixels).expand(-1, 2, -1, -1)


def mixed(seed: int = 0, **options: float) -> MixedBatch:
    generator = torch.Generator().manual_seed(seed)
    return cutmix_on_patch_grid(
        numbered(), torch.arange(6), (3, 4), classes=6, generator=generator, **options
    )


def test_every_patch_is_of_the_image_that_its_label_says() -> None:
    seen = set()
    for seed in range(40):
        batch = mixed(seed)
        patches = batch.images[:, 0, ::2, ::2].flatten(1)
        source, position = patches // 100, patches % 100
        assert (position == torch.arange(12)).all()
        assert (batch.patch_labels.argmax(-1) == source).all()
        assert (batch.patch_labels.sum(-1) == 1).all()
        assert torch.allclose(batch.patch_labels.mean(1), batch.labels)
        assert (source[:, batch.own] == torch.arange(6)[:, None]).all()
        assert (source[:, ~batch.own] == batch.partner[:, None]).all()
        assert torch.equal(batch.own_labels[batch.partner], batch.partner_labels)
        assert sorted(batch.partner.tolist()) == list(range(6))
        rows, columns = torch.nonzero(batch.own.reshape(3, 4), as_tuple=True)
        if len(rows):
            area = (np.ptp(rows.numpy()) + 1) * (np.ptp(columns.numpy()) + 1)
            assert area == batch.own.sum()  # one whole rectangle
        seen.add(int(batch.own.sum()))
    assert len(seen) > 5 and max(seen) > 8 and min(seen) < 3


def test_labels_may_be_distributions() -> None:
    soft = torch.softmax(torch.randn(6, 4), -1)
    batch = cutmix_on_patch_grid(numbered(), soft, (3, 4))
    assert torch.allclose(batch.labels.sum(-1), torch.ones(6))
    assert torch.allclose(batch.patch_labels.mean(1), batch.labels)


def test_the_same_seed_mixes_the_same() -> None:
    first, again, other = mixed(3), mixed(3), mixed(4)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    torch.manual_seed(1)
    one = cutmix_on_patch_grid(numbered(), torch.arange(6), (3, 4), classes=6)
    torch.manual_seed(1)
    two = cutmix_on_patch_grid(numbered(), torch.arange(6), (3, 4), classes=6)
    assert torch.equal(one.images, two.images)


def test_the_share_is_about_half_on_average() -> None:
    shares = [mixed(seed).own.float().mean().item() for seed in range(400)]
    # The rectangle is rounded down, so a little under the mean of Beta(1, 1).
    assert 0.38 < float(np.mean(shares)) < 0.5
    steady = [mixed(seed, alpha=1000.0).own.sum().item() for seed in range(50)]
    assert set(steady) <= {3, 4, 5, 6}


def test_uniform_logits_cost_ln_c() -> None:
    labels = F.one_hot(torch.randint(10, (3, 16)), 10).double()
    loss = patch_mixing_loss(torch.zeros(3, 16, 10, dtype=torch.float64), labels)
    assert loss.item() == pytest.approx(2.3025850930, abs=1e-10)


def test_patch_loss_is_the_mean_cross_entropy() -> None:
    logits, classes = torch.randn(3, 5, 4), torch.randint(4, (3, 5))
    labels = F.one_hot(classes, 4).float()
    expected = F.cross_entropy(logits.flatten(0, 1), classes.flatten())
    assert patch_mixing_loss(logits, labels).item() == pytest.approx(expected.item())
    valid = torch.tensor([[True, True, False, False, False], [True] * 5, [False] * 5])
    first = F.cross_entropy(logits[0, :2], classes[0, :2])
    second = F.cross_entropy(logits[1], classes[1])
    masked = patch_mixing_loss(logits, labels, valid)
    assert masked.item() == pytest.approx((first + second).item() / 2)
    with pytest.raises(AttoscopeError, match="at least one"):
        patch_mixing_loss(logits, labels, torch.zeros_like(valid))


def test_region_loss_by_hand() -> None:
    batch = mixed(1)
    assert 0 < batch.own.sum() < 12
    tokens, head = torch.randn(6, 12, 8), nn.Linear(8, 6)
    share = batch.own.float().mean()
    own = F.cross_entropy(head(tokens[:, batch.own].mean(1)), torch.arange(6))
    others = F.cross_entropy(head(tokens[:, ~batch.own].mean(1)), batch.partner)
    loss = region_mixing_loss(tokens, batch, head, dropout=0.0)
    assert loss.item() == pytest.approx((share * own + (1 - share) * others).item())
    uniform = region_mixing_loss(tokens, batch, lambda x: torch.zeros(6, 6))
    assert uniform.item() == pytest.approx(math.log(6))
    with pytest.raises(AttoscopeError, match="one token per patch"):
        region_mixing_loss(torch.randn(6, 13, 8), batch, head)


def test_dropout_of_the_region_loss_is_on() -> None:
    batch, tokens, head = mixed(1), torch.randn(6, 12, 8), nn.Linear(8, 6)
    first = region_mixing_loss(tokens, batch, head, dropout=0.5)
    assert first != region_mixing_loss(tokens, batch, head, dropout=0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rare_classes_in_half_precision(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 4, 3, dtype=dtype)
    logits[..., 0] = 1000.0
    labels = F.one_hot(torch.full((1, 4), 1), 3).float()
    loss = patch_mixing_loss(logits, labels)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(1000.0)
    batch = mixed(1)
    sure = torch.zeros(6, 6, dtype=dtype)
    sure[:, 0] = 1000.0
    region = region_mixing_loss(torch.randn(6, 12, 8).to(dtype), batch, lambda _: sure)
    assert torch.isfinite(region) and region > 500


def test_bad_input_is_refused_in_a_sentence() -> None:
    images, classes = numbered(), torch.arange(6)
    with pytest.raises(AttoscopeError, match="divide"):
        cutmix_on_patch_grid(images, classes, (4, 4), classes=6)
    with pytest.raises(AttoscopeError, match="above 0"):
        cutmix_on_patch_grid(images, classes, (3, 4), classes=6, alpha=0.0)
    with pytest.raises(AttoscopeError, match="classes=10"):
        cutmix_on_patch_grid(images, classes, (3, 4))
