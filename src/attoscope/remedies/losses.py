"""Losses that keep the tokens of a sequence distinct, added to the loss that trains a model.

From "Vision Transformers with Patch Diversification" (Gong et al., arXiv 2104.12753), whose
released code differs from the paper, and from its independent implementation in "The Principle of
Diversity" (Chen et al., arXiv 2203.06345, "Diverse-ViT"). All take content tokens, without [CLS];
`attoscope.remedies.tokens.BlockTokens` catches them. Half precision is computed in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from attoscope.errors import AttoscopeError


def cosine_loss(
    tokens: Float[Tensor, "batch token width"],
    valid: Shaped[Tensor, ...] | None = None,
    *,
    absolute: bool = True,
    diagonal: bool = False,
) -> Float[Tensor, ""]:
    """Mean cosine of pairs of tokens, per sequence: `1/(n(n-1)) sum_{i != j} |cos(h_i, h_j)|`.

    In [0, 1]; without `absolute` signed, in [-1/(n-1), 1]. 1 says that all tokens lie on one line
    (signed: that they point the same way). With `diagonal` the mean is over all n^2 pairs, as
    Diverse-ViT has it (signed): `((n-1) c + 1)/n`. `tokens` are those of the last block. Tokens
    that are 0 or not `valid` (a flag per token, or a mask of 0 and 1) are left out, and so
    are sequences with fewer than two tokens.

    Costs an n × n matrix per sequence; the signed form costs O(n d). What it cannot do: where all
    tokens are equal its gradient is 0, so it prevents collapse and does not undo it. The signed
    form is also low where tokens lie on one line with mixed signs. Alike is not bad by itself: a
    classifier that averages tokens wants some of it.

    Raises AttoscopeError where no sequence has two tokens, or `tokens` and `valid` are not such.
    """
    check_tokens("tokens", tokens)
    here = valid_tokens(tokens, valid)
    with torch.autocast(tokens.device.type, enabled=False):
        x = _full(tokens)
        here = here & (x != 0).any(-1)
        unit = _unit(x, here)
        own = unit.square().sum((1, 2))
        if absolute:
            total = (unit @ unit.mT).abs().sum((1, 2))
        else:
            total = unit.sum(1).square().sum(-1)
        count = here.sum(1)
        # Sequences that are left out must not divide by 0: its gradient would be NaN for all.
        n = count.clamp(min=2)
        each = total / n.square() if diagonal else (total - own) / (n * (n - 1))
        return _mean_of_sequences(each, count, "cosine_loss")


def patch_contrastive_loss(
    last: Float[Tensor, "batch token width"],
    first: Float[Tensor, "first_batch first_token first_width"],
    valid: Shaped[Tensor, ...] | None = None,
    *,
    normalise: bool = True,
    include_self: bool = True,
    detach: bool = True,
) -> Float[Tensor, ""]:
    """Ties each last token h_i to its own early token e_i, against the mean of the others.

    `1/n sum_i -log(exp(e_i.h_i) / (exp(e_i.h_i) + exp(e_i.m_i)))`, which is the mean of
    `softplus(e_i.m_i - e_i.h_i)`; at least 0, and ln 2 = 0.693 where all last tokens are equal.
    `m_i` is the mean of all h_j, or without `include_self` of those with j != i. With `normalise`
    all vectors are scaled to length 1 first (m_i is the mean of the scaled ones), without it the
    loss grows with the width. The paper: `normalise=False`; Diverse-ViT: `include_self=False,
    detach=False`. `detach` stops the gradient at the early tokens.

    Costs O(n d). Its gradient at equal tokens is `-(e_i - mean e)/(2n)` (paper form), not 0: it can
    undo a collapse. What it cannot do: keep the rank up. It lowers the signed cosine, while tokens
    with alternating signs keep the absolute one high: watch both.

    Raises AttoscopeError where no sequence has two tokens, or the two shapes differ.
    """
    _same_shape(last, first)
    here = valid_tokens(last, valid)
    with torch.autocast(last.device.type, enabled=False):
        h, e = _full(last), _full(first.detach() if detach else first)
        if normalise:
            h, e = _unit(h, here), _unit(e, here)
        else:
            h = torch.where(here[..., None], h, 0.0)
            e = torch.where(here[..., None], e, 0.0)
        count = here.sum(1)
        n = count.clamp(min=2)[:, None, None]
        total = h.sum(1, keepdim=True)
        mean = total / n if include_self else (total - h) / (n - 1)
        each = F.softplus((e * mean).sum(-1) - (e * h).sum(-1))
        each = torch.where(here, each, 0.0).sum(1) / n[:, 0, 0]
        return _mean_of_sequences(each, count, "patch_contrastive_loss")


def local_contrastive_loss(
    last: Float[Tensor, "batch token width"],
    first: Float[Tensor, "first_batch first_token first_width"],
    grid: tuple[int, int],
    *,
    window: int = 7,
    epsilon: float = 0.0,
    detach: bool = True,
) -> Float[Tensor, ""]:
    """The contrastive loss of the authors' released code: each patch against two means.

    Three logits per patch: `e_i.h_i`, `e_i.m_i` and `e_i.l_i`; the loss is the mean of
    `-log(softmax_1 + epsilon)` (1e-8 in the released code). `m_i` is the mean of the other patches,
    `l_i` that of the others in a window of `window` × `window` patches, in which what lies outside
    the image counts as 0: at the border `l_i` is smaller than a mean. `grid` is (rows, columns) of
    patches. At least 0; ln 3 for equal patches of length 0.

    Costs O(n d) and one pooling. Dot products are raw, so its scale depends on the width. There is
    no form for padded text: patches need a grid.

    Raises AttoscopeError for a grid of another number of patches or of one, and an even window.
    """
    _same_shape(last, first)
    batch, n, width = last.shape
    rows, columns = grid
    if rows * columns != n or n < 2:
        raise AttoscopeError(
            f"grid: got {rows} × {columns} for {n} patch(es); expected rows × columns that make up "
            "all patches, and at least two of them: leave [CLS] out"
        )
    if window < 3 or window % 2 == 0:
        raise AttoscopeError(f"window: got {window}; expected an odd number from 3 on")
    with torch.autocast(last.device.type, enabled=False):
        h, e = _full(last), _full(first.detach() if detach else first)
        picture = h.mT.reshape(batch, width, rows, columns)
        area = window**2
        # avg_pool2d counts the padding: a window always has `area` patches.
        pooled = F.avg_pool2d(picture, window, stride=1, padding=window // 2)
        near = (area * pooled - picture).flatten(2).mT / (area - 1)
        rest = (h.sum(1, keepdim=True) - h) / (n - 1)
        logits = torch.stack([(e * other).sum(-1) for other in (h, rest, near)], -1)
        chosen = logits.log_softmax(-1)[..., 0]
        if epsilon > 0.0:
            chosen = torch.logaddexp(chosen, torch.full_like(chosen, math.log(epsilon)))
        return -chosen.mean()


def _full(x: Tensor) -> Tensor:
    """At least float32: squares of half-precision numbers overflow or vanish."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _unit(x: Tensor, here: Tensor) -> Tensor:
    """Rows of length 1; 0 where not `here` or where the row is 0, without a gradient there."""
    real = (here & (x != 0).any(-1))[..., None]
    safe = torch.where(real, x, 1.0)
    unit: Tensor = safe / torch.linalg.vector_norm(safe, dim=-1, keepdim=True)
    return torch.where(real, unit, 0.0)


def check_tokens(name: str, tokens: Any) -> None:
    """A sentence for what is no tensor of numbers, (batch, token, width)."""
    if not isinstance(tokens, Tensor):
        found = type(tokens).__name__
    elif tokens.dim() != 3:
        found = f"shape {tuple(tokens.shape)}"
    elif not tokens.is_floating_point():
        found = str(tokens.dtype)
    else:
        return
    raise AttoscopeError(
        f"{name}: got {found}; expected a tensor of floating-point numbers of shape (batch, token, "
        "width): the stream after a block, as BlockTokens gives it"
    )


def valid_tokens(tokens: Tensor, valid: Any) -> Bool[Tensor, "batch token"]:
    """A flag per token, from booleans or a mask of 0 and 1; all of them where it is None."""
    if valid is None:
        return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if not isinstance(valid, Tensor):
        raise AttoscopeError(
            f"valid: got {type(valid).__name__}; expected a tensor with one flag per token, as an "
            "attention mask"
        )
    if valid.shape != tokens.shape[:2]:
        raise AttoscopeError(
            f"valid: got shape {tuple(valid.shape)} for tokens of {tuple(tokens.shape)}; expected "
            "one flag per token: leave [CLS] out of both"
        )
    if valid.dtype != torch.bool and not bool(((valid == 0) | (valid == 1)).all()):
        raise AttoscopeError(
            f"valid: got {valid.dtype} with numbers other than 0 and 1; expected a flag per token: "
            "1 or True for content, 0 or False for padding"
        )
    return valid.to(tokens.device).bool()


def _same_shape(last: Any, first: Any) -> None:
    check_tokens("last", last)
    check_tokens("first", first)
    if last.shape != first.shape:
        raise AttoscopeError(
            f"first: got shape {tuple(first.shape)} beside last tokens of {tuple(last.shape)}; "
            "expected the same tokens at two depths of one width"
        )


def _mean_of_sequences(each: Tensor, count: Tensor, name: str) -> Tensor:
    """Mean over the sequences that have two tokens."""
    enough = count >= 2
    if not bool(enough.any()):
        most = int(count.max()) if len(count) else 0
        raise AttoscopeError(
            f"{name}: no sequence has two tokens to compare (the longest has {most} that is valid "
            "and not 0); expected at least two: check the mask, and leave such batches out"
        )
    return each[enough].mean()
