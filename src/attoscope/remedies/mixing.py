"""CutMix on the patch grid, and the losses that ask each patch which image it comes from.

Gong et al., arXiv 2104.12753. What these losses cannot do: keep patches apart. Within one image
all patches of a region have the same label, so the loss pulls them together; on handwritten digits
it raises the mean cosine by itself (docs/treating.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.remedies.losses import check_tokens, valid_tokens


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """Images of two sources each, cut along the patch grid, and whose each patch is.

    `own` says which patches (row by row) are of the image itself; the others are of the image
    `partner[i]` of the batch. Every label is a distribution over classes: `labels` is that of the
    mixed image, the mean of `patch_labels` over patches.
    """

    images: Float[Tensor, "batch channel height width"]
    labels: Float[Tensor, "batch class"]
    patch_labels: Float[Tensor, "batch patch class"]
    own: Bool[Tensor, " patch"]
    partner: Int[Tensor, " batch"]
    own_labels: Float[Tensor, "batch class"]
    partner_labels: Float[Tensor, "batch class"]


def cutmix_on_patch_grid(
    images: Float[Tensor, "batch channel height width"],
    labels: Int[Tensor, " batch"] | Float[Tensor, "batch class"],
    grid: tuple[int, int],
    *,
    classes: int | None = None,
    alpha: float = 1.0,
    generator: torch.Generator | None = None,
) -> MixedBatch:
    """Pastes one rectangle of whole patches of each image onto another image of the batch.

    The rectangle holds about a share `lam ~ Beta(alpha, alpha)` of the patches, its height is
    random; it is the same for the whole batch, and the other image is a random one (possibly the
    same). Labels are class numbers, with their number `classes`, or distributions over classes.
    `grid` is (rows, columns) of patches. Randomness comes from `generator`, or torch's own.

    Costs a copy of the batch. The network sees fewer whole images: compare losses that need it with
    a baseline that has CutMix too.

    Raises AttoscopeError where the grid does not divide the images, `alpha` is not positive, or
    class numbers come without their number.
    """
    rows, columns = grid
    height, width = images.shape[2:]
    if min(rows, columns) < 1 or height % rows or width % columns:
        raise AttoscopeError(
            f"grid: got {rows} × {columns} for images of {height} × {width} pixels; expected "
            "numbers of patches that divide them"
        )
    if not alpha > 0.0:
        raise AttoscopeError(f"alpha: got {alpha}; expected a number above 0")
    own_labels = _distributions(labels, classes).to(images.device)
    seed = int(torch.randint(2**62, (1,), generator=generator))
    rng = np.random.default_rng(seed)
    mask = _rectangle(rng, rows, columns, rng.beta(alpha, alpha))
    own = torch.from_numpy(mask).to(images.device)
    partner = torch.from_numpy(rng.permutation(len(images))).to(images.device)
    pixels = own.repeat_interleave(height // rows, 0).repeat_interleave(width // columns, 1)
    own = own.flatten()
    partner_labels = own_labels[partner]
    patch_labels = torch.where(own[None, :, None], own_labels[:, None], partner_labels[:, None])
    return MixedBatch(
        images=torch.where(pixels, images, images[partner]),
        labels=patch_labels.mean(1),
        patch_labels=patch_labels,
        own=own,
        partner=partner,
        own_labels=own_labels,
        partner_labels=partner_labels,
    )


def patch_mixing_loss(
    logits: Float[Tensor, "batch patch class"],
    labels: Float[Tensor, "batch patch class"],
    valid: Shaped[Tensor, ...] | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy of each patch with the label of its own source image, in nats.

    `1/n sum_i CE(g(h_i), y_i)`, mean over images; ln C for uniform logits. `logits` are a shared
    linear classifier of the last patch tokens, `labels` `MixedBatch.patch_labels`. Diverse-ViT uses
    the classifier of [CLS], and takes the mean over [CLS] and patches together.

    Costs one classifier over all patches. It does not make patches distinct: see the top of this
    module.

    Raises AttoscopeError where no patch is valid.
    """
    check_tokens("logits", logits)
    check_tokens("labels", labels)
    with torch.autocast(logits.device.type, enabled=False):
        each = -(labels * _log_softmax(logits)).sum(-1)
    if valid is None:
        return each.mean()
    valid = valid_tokens(logits, valid)
    count = valid.sum(1)
    if not bool((count > 0).any()):
        raise AttoscopeError(
            "patch_mixing_loss: no token is valid; expected at least one: check the mask"
        )
    totals = torch.where(valid, each, 0.0).sum(1)
    return (totals[count > 0] / count[count > 0]).mean()


def region_mixing_loss(
    patches: Float[Tensor, "batch patch width"],
    mixed: MixedBatch,
    head: Callable[[Tensor], Tensor],
    *,
    dropout: float = 0.2,
) -> Float[Tensor, ""]:
    """The mixing loss of the authors' released code: one label per region, not per patch.

    For each of the two regions the mean of its patches goes through dropout and `head`, a linear
    classifier; the loss is the Kullback-Leibler divergence from the region's label in nats,
    weighted by the region's share of the patches. At least 0; with labels of one class equal to
    the cross-entropy.

    Raises AttoscopeError where there are not as many patches as the grid has.
    """
    check_tokens("patches", patches)
    if patches.shape[1] != len(mixed.own):
        raise AttoscopeError(
            f"patches: got {patches.shape[1]} for a grid of {len(mixed.own)}; expected one token "
            "per patch: leave [CLS] out"
        )
    own = mixed.own[None, :, None]
    loss = patches.new_zeros((), dtype=torch.promote_types(patches.dtype, torch.float32))
    for region, labels in ((own, mixed.own_labels), (~own, mixed.partner_labels)):
        size = int(region.sum())
        if size:
            mean = torch.where(region, patches, 0.0).sum(1) / size
            logits = head(F.dropout(mean, dropout))
            with torch.autocast(patches.device.type, enabled=False):
                divergence = F.kl_div(_log_softmax(logits), labels, reduction="batchmean")
            loss = loss + size / len(mixed.own) * divergence
    return loss


def _log_softmax(logits: Tensor) -> Tensor:
    """In float32 at least: softmax().log() of half precision is -inf for a rare class."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _rectangle(rng: np.random.Generator, rows: int, columns: int, share: float) -> np.ndarray:
    """A random rectangle of about that share of a grid; none of it where that is under one."""
    mask = np.zeros((rows, columns), bool)
    area = int(rows * columns * share)
    if area:
        height = int(rng.integers(1, min(rows, area) + 1))
        if area // height > columns:
            height = area // columns
        width = min(area // height, columns)
        top = int(rng.integers(rows - height + 1))
        left = int(rng.integers(columns - width + 1))
        mask[top : top + height, left : left + width] = True
    return mask


def _distributions(labels: Tensor, classes: int | None) -> Tensor:
    if labels.is_floating_point():
        return labels
    if classes is None:
        raise AttoscopeError(
            "labels: got class numbers without their number; give classes=10, or distributions "
            "over classes of shape (batch, class)"
        )
    return F.one_hot(labels, classes).float()
