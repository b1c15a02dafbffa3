"""Losses against over-smoothing: exact values, gradients, masks, half precision."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.remedies.losses import (
    cosine_loss,
    local_contrastive_loss,
    patch_contrastive_loss,
)

I4 = torch.eye(4, dtype=torch.float64)[None]
COMPASS = torch.tensor([[[1.0, 0], [0, 1], [-1, 0], [0, -1]]], dtype=torch.float64)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def collapsed(n: int = 5, d: int = 3) -> Tensor:
    return random(1, 1, d).expand(2, n, d).clone().requires_grad_()


# Cosine.


@pytest.mark.parametrize(
    ("tokens", "signed", "absolute"),
    [
        (I4, 0.0, 0.0),
        (torch.ones(1, 4, 3, dtype=torch.float64), 1.0, 1.0),
        (COMPASS, -1 / 3, 1 / 3),
        (torch.tensor([[[1.0, 1], [1, -1]]], dtype=torch.float64), 0.0, 0.0),
    ],
)
def test_cosine_of_known_tokens(tokens: Tensor, signed: float, absolute: float) -> None:
    assert cosine_loss(tokens, absolute=False).item() == pytest.approx(signed, abs=1e-15)
    assert cosine_loss(tokens).item() == pytest.approx(absolute, abs=1e-15)


def test_cosine_with_the_diagonal() -> None:
    assert cosine_loss(I4, absolute=False, diagonal=True).item() == pytest.approx(0.25)
    x = random(1, 6, 3)
    c = cosine_loss(x, absolute=False).item()
    with_diagonal = cosine_loss(x, absolute=False, diagonal=True).item()
    assert with_diagonal == pytest.approx((5 * c + 1) / 6, abs=1e-15)


def test_cosine_by_pairs() -> None:
    x = random(2, 5, 3)
    pairs = [
        torch.cosine_similarity(x[b, i], x[b, j], dim=0)
        for b in range(2)
        for i in range(5)
        for j in range(5)
        if i != j
    ]
    values = torch.stack(pairs)
    assert cosine_loss(x, absolute=False).item() == pytest.approx(values.mean().item())
    assert cosine_loss(x).item() == pytest.approx(values.abs().mean().item())


@pytest.mark.parametrize("absolute", [True, False])
def test_cosine_has_no_gradient_at_collapse(absolute: bool) -> None:
    x = collapsed()
    cosine_loss(x, absolute=absolute).backward()
    assert x.grad is not None and x.grad.abs().max() < 1e-15


@pytest.mark.parametrize("absolute", [True, False])
def test_cosine_gradient_by_differences(absolute: bool) -> None:
    x = random(2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: cosine_loss(y, absolute=absolute), x)


def test_a_token_of_zero_is_left_out_and_gets_no_gradient() -> None:
    x = torch.cat([COMPASS, torch.zeros(1, 1, 2, dtype=torch.float64)], 1).requires_grad_()
    loss = cosine_loss(x)
    assert loss.item() == pytest.approx(1 / 3)
    loss.backward()
    assert x.grad is not None and torch.isfinite(x.grad).all() and (x.grad[0, -1] == 0).all()


# Contrastive.


def test_contrastive_of_known_tokens() -> None:
    paper = patch_contrastive_loss(I4, I4, normalise=False)
    assert paper.item() == pytest.approx(0.3868710061, abs=1e-10)
    assert paper.item() == pytest.approx(math.log(1 + math.exp(0.25 - 1)))
    for normalise in (True, False):
        others = patch_contrastive_loss(I4, I4, normalise=normalise, include_self=False)
        assert others.item() == pytest.approx(0.3132616875, abs=1e-10)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("include_self", [True, False])
def test_contrastive_of_equal_tokens_is_ln_2(normalise: bool, include_self: bool) -> None:
    loss = patch_contrastive_loss(
        collapsed(), random(2, 5, 3), normalise=normalise, include_self=include_self
    )
    assert loss.item() == pytest.approx(math.log(2), abs=1e-12)


def test_contrastive_as_the_independent_implementation_has_it() -> None:
    e, h = random(2, 5, 3), random(2, 5, 3)
    unit_e, unit_h = (x / x.norm(dim=2, keepdim=True) for x in (e, h))
    similarity = torch.einsum("abc,adc->abd", unit_e, unit_h)
    own = similarity.diagonal(dim1=1, dim2=2)
    others = torch.exp((similarity.sum(2) - own) / 4)
    expected = -torch.log(own.exp() / (own.exp() + others)).mean()
    loss = patch_contrastive_loss(h, e, include_self=False, detach=False)
    assert loss.item() == pytest.approx(expected.item())


def test_contrastive_gradient_at_collapse() -> None:
    n, h, e = 5, collapsed(), random(2, 5, 3)
    patch_contrastive_loss(h, e, normalise=False).backward()
    # Two sequences: half of the mean over them.
    expected = -(e - e.mean(1, keepdim=True)) / (2 * n) / 2
    assert h.grad is not None and torch.allclose(h.grad, expected, atol=1e-16)


def test_the_early_tokens_get_a_gradient_only_when_asked() -> None:
    e = random(1, 4, 3).requires_grad_()
    h = random(1, 4, 3).requires_grad_()
    patch_contrastive_loss(h, e).backward()
    local_contrastive_loss(h, e, (2, 2)).backward()
    assert e.grad is None
    patch_contrastive_loss(h, e, detach=False).backward()
    assert e.grad is not None and e.grad.abs().max() > 0


def test_contrastive_gradient_by_differences() -> None:
    e, h = random(2, 4, 3).requires_grad_(), random(2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda y, x: patch_contrastive_loss(y, x, detach=False), (h, e)
    )


# The released form.


def test_local_contrastive_with_borders() -> None:
    ones = torch.ones(1, 9, 1, dtype=torch.float64)
    inside = torch.tensor([4, 6, 4, 6, 9, 6, 4, 6, 4], dtype=torch.float64)
    expected = (torch.log(2 * math.e + torch.exp((inside - 1) / 8)) - 1).mean().item()
    loss = local_contrastive_loss(ones, ones, (3, 3), window=3)
    assert loss.item() == pytest.approx(expected, abs=1e-14)
    assert loss.item() == pytest.approx(0.9748812507, abs=1e-10)
    released = local_contrastive_loss(ones, ones, (3, 3), window=3, epsilon=1e-8)
    assert released.item() == pytest.approx(0.9748812241, abs=1e-10)
    assert loss.item() < math.log(3) - 0.1  # what it would be if borders counted in full


def test_local_contrastive_by_loops() -> None:
    rows, columns, window = 3, 4, 5
    h, e = random(1, 12, 2), random(1, 12, 2)
    at = [(i // columns, i % columns) for i in range(12)]
    total = 0.0
    for i, (r, c) in enumerate(at):
        near = [j for j, (s, t) in enumerate(at) if max(abs(r - s), abs(c - t)) <= 2 and j != i]
        rest = [j for j in range(12) if j != i]
        means = [h[0, i], h[0, rest].sum(0) / 11, h[0, near].sum(0) / (window**2 - 1)]
        logits = torch.stack([e[0, i] @ m for m in means])
        total -= logits.log_softmax(0)[0].item()
    loss = local_contrastive_loss(h, e, (rows, columns), window=window)
    assert loss.item() == pytest.approx(total / 12)


# Masks, precision, refusals.


@pytest.mark.parametrize("absolute", [True, False])
def test_padding_counts_for_nothing(absolute: bool) -> None:
    h, e = random(2, 6, 3), random(2, 6, 3)
    valid = torch.arange(6) < torch.tensor([[4], [6]])
    padded = h.masked_fill(~valid[..., None], 1e9)
    apart = [cosine_loss(x, absolute=absolute).item() for x in (h[:1, :4], h[1:])]
    together = cosine_loss(padded, valid, absolute=absolute).item()
    assert together == pytest.approx(sum(apart) / 2)
    for normalise in (True, False):
        for include in (True, False):
            options = {"normalise": normalise, "include_self": include}
            pieces = [
                patch_contrastive_loss(x, y, **options).item()
                for x, y in ((h[:1, :4], e[:1, :4]), (h[1:], e[1:]))
            ]
            whole = patch_contrastive_loss(padded, e, valid, **options).item()
            assert whole == pytest.approx(sum(pieces) / 2)


def test_a_sequence_of_one_token_is_left_out() -> None:
    h, e = random(2, 4, 3), random(2, 4, 3)
    valid = torch.tensor([[True, False, False, False], [True] * 4])
    assert cosine_loss(h, valid).item() == pytest.approx(cosine_loss(h[1:]).item())
    expected = patch_contrastive_loss(h[1:], e[1:], include_self=False).item()
    loss = patch_contrastive_loss(h, e, valid, include_self=False)
    assert loss.item() == pytest.approx(expected)


def test_padding_gets_no_gradient_and_breaks_none() -> None:
    h = random(2, 4, 3).requires_grad_()
    valid = torch.tensor([[True, False, False, False], [True, True, True, False]])
    loss = cosine_loss(h, valid) + patch_contrastive_loss(
        h, random(2, 4, 3), valid, include_self=False
    )
    loss.backward()
    assert h.grad is not None and torch.isfinite(h.grad).all()
    assert (h.grad[~valid] == 0).all() and h.grad[1, :3].abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_of_large_tokens(dtype: torch.dtype) -> None:
    h = (300 * torch.randn(2, 16, 32)).to(dtype).requires_grad_()
    e = (300 * torch.randn(2, 16, 32)).to(dtype)
    for loss, exact in (
        (cosine_loss(h), cosine_loss(h.double())),
        (patch_contrastive_loss(h, e), patch_contrastive_loss(h.double(), e.double())),
        (
            patch_contrastive_loss(h, e, normalise=False),
            patch_contrastive_loss(h.double(), e.double(), normalise=False),
        ),
        (
            local_contrastive_loss(h, e, (4, 4)),
            local_contrastive_loss(h.double(), e.double(), (4, 4)),
        ),
    ):
        assert loss.dtype == torch.float32 and torch.isfinite(loss)
        assert loss.item() == pytest.approx(exact.item(), rel=1e-4)
        loss.backward()
    assert h.grad is not None and torch.isfinite(h.grad).all()


def test_autocast_does_not_lower_the_precision() -> None:
    h, e = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = cosine_loss(h), patch_contrastive_loss(h, e)
    assert inside == (cosine_loss(h), patch_contrastive_loss(h, e))


def test_one_token_and_empty_masks_are_refused_in_a_sentence() -> None:
    one, many = random(2, 1, 3), random(2, 4, 3)
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    for call in (
        lambda: cosine_loss(one),
        lambda: patch_contrastive_loss(one, one),
        lambda: cosine_loss(many, nothing),
        lambda: patch_contrastive_loss(many, many, nothing),
        lambda: cosine_loss(torch.zeros(2, 4, 3)),
        lambda: cosine_loss(random(0, 4, 3)),
    ):
        with pytest.raises(AttoscopeError, match="at least two"):
            call()


def test_other_bad_input_is_refused_in_a_sentence() -> None:
    x = random(1, 9, 3)
    with pytest.raises(AttoscopeError, match="one flag per token"):
        cosine_loss(x, torch.ones(1, 10, dtype=torch.bool))
    with pytest.raises(AttoscopeError, match="one width"):
        patch_contrastive_loss(x, random(1, 9, 4))
    with pytest.raises(AttoscopeError, match=r"got 2 × 4 for 9 patch"):
        local_contrastive_loss(x, x, (2, 4))
    with pytest.raises(AttoscopeError, match="at least two of them"):
        local_contrastive_loss(x[:, :1], x[:, :1], (1, 1))
    with pytest.raises(AttoscopeError, match="odd number"):
        local_contrastive_loss(x, x, (3, 3), window=4)


MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_a_mask_of_0_and_1_is_as_flags(dtype: torch.dtype) -> None:
    x, y = random(2, 4, 3), random(2, 4, 3)
    flags, mask = MASK.bool(), MASK.to(dtype)
    assert torch.equal(cosine_loss(x, mask), cosine_loss(x, flags))
    assert not torch.equal(cosine_loss(x, flags), cosine_loss(x))
    expected = patch_contrastive_loss(x, y, flags)
    assert torch.equal(patch_contrastive_loss(x, y, mask), expected)


def test_what_is_no_mask_and_what_are_no_tokens() -> None:
    x = random(2, 4, 3)
    with pytest.raises(AttoscopeError, match="numbers other than 0 and 1"):
        cosine_loss(x, MASK * 2)
    with pytest.raises(AttoscopeError, match="numbers other than 0 and 1"):
        patch_contrastive_loss(x, x, MASK.float() / 2)
    # Without the type checker that runs in these tests.
    plain = inspect.unwrap(cosine_loss)
    bad = (random(4, 3), "x", None, torch.ones(2, 4, 3, dtype=torch.long))
    for tokens, found in zip(bad, (r"shape \(4, 3\)", "str", "NoneType", "int64"), strict=True):
        with pytest.raises(AttoscopeError, match=f"tokens: got .*{found}; expected a tensor"):
            plain(tokens)
        with pytest.raises(AttoscopeError, match="last: got"):
            inspect.unwrap(patch_contrastive_loss)(tokens, x)
        with pytest.raises(AttoscopeError, match="first: got"):
            inspect.unwrap(local_contrastive_loss)(x, tokens, (2, 2))
    with pytest.raises(AttoscopeError, match="valid: got list"):
        plain(x, [[True]])
