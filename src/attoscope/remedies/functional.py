"""NeuTRENO in plain tensors: its attention, the functional behind it, and where it ends.

Softmax attention is one explicit gradient step of a functional that only constant tokens
minimise. NeuTRENO adds a pull towards an anchor, the values of the first layer. All of it is per
head, on values before the output projection; batch and head axes are free and come first.

Source: Nguyen, Nguyen and Baraniuk, arXiv 2312.00751 (NeurIPS 2023). Where the stacked layers end,
and up to which strength they do, is derived here.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from attoscope.errors import AttoscopeError

# Rows of half-precision attention sum to one only about.
_ROW_SUM = 1.02


def neutreno_attention(
    weights: Float[Tensor, "... query key"],
    values: Float[Tensor, "... token size"],
    first: Float[Tensor, "... first_token first_size"] | None,
    strength: float | Float[Tensor, "*strengths"],
) -> Float[Tensor, "... query size"]:
    """What a head gives: `weights @ values + strength * (first - values)`.

    Args:
        weights: attention, rows are queries and sum to 1.
        values: value vectors of this layer.
        first: those of the first layer (the anchor), of the same shape; None in the first layer
            itself, which is plain attention. Gradients flow to it.
        strength: lambda of the paper, 0.4 to 0.6 there; 0 is plain attention, to the last bit.
            A tensor is broadcast against the values, as (head, 1, 1) is for one per head.

    Each token is pulled towards its own first value, at no cost but one addition. Below
    `stability_limit` layers with the same attention settle; above it they grow without bound.

    Raises:
        AttoscopeError: where shapes do not fit, or queries are not the keys (cross-attention, a
            cache): the pull needs the value of each query's own token.

    Source: arXiv 2312.00751, the NeuTRENO layer.
    """
    _check_weights(weights, values)
    plain = weights @ values
    if first is None or isinstance(strength, int | float) and strength == 0:
        return plain
    _check_same("first", first, values)
    if isinstance(strength, Tensor):
        strength = strength.to(values.dtype)
    return plain + strength * (first - values)


def laplacian(kernel: Float[Tensor, "... token token"]) -> Float[Tensor, "... token token"]:
    """`L = diag(S 1) - S` of the symmetric part `S = (kernel + kernel^T) / 2`.

    `2 L U` is the gradient of `nonlocal_energy` at U.
    """
    symmetric = (kernel + kernel.mT) / 2
    # A token's own weight cancels; left in, a large one would leave its rounding behind.
    symmetric = symmetric - torch.diag_embed(symmetric.diagonal(dim1=-2, dim2=-1))
    return torch.diag_embed(symmetric.sum(-1)) - symmetric


def nonlocal_energy(
    kernel: Float[Tensor, "... token token"], values: Float[Tensor, "... values size"]
) -> Float[Tensor, "*heads"]:
    """`J(U) = 1/2 sum_ij k_ij |u_i - u_j|^2`: how much tokens differ where the kernel ties them.

    From 0 (all tied tokens are equal) up, in squared units of the values: divide by `|U|_F^2`
    before layers are compared. The kernel (attention, or its exponentials before they are divided)
    counts by its symmetric part alone. A small enough step down the gradient never raises it.

    Raises:
        AttoscopeError: where kernel and values are not about the same tokens.

    Source: arXiv 2312.00751, the nonlocal functional.
    """
    _check_weights(kernel, values)
    # The mean adds nothing to a difference, and would drown it in rounding.
    centred = values - values.mean(-2, keepdim=True)
    return (centred * (laplacian(kernel) @ centred)).sum((-2, -1))


def fidelity(
    values: Float[Tensor, "... token size"], anchor: Float[Tensor, "... anchors anchor_size"]
) -> Float[Tensor, "*heads"]:
    """`1/2 |U - F|_F^2`: how far the values are from the anchor, from 0 up.

    Strength times this, added to `nonlocal_energy`, is the regularised functional.

    Raises:
        AttoscopeError: where the two have not the same shape.

    Source: arXiv 2312.00751, the regularised functional.
    """
    _check_same("anchor", anchor, values)
    return (values - anchor).square().sum((-2, -1)) / 2


def flow_limit(
    kernel: Float[Tensor, "... token token"],
    anchor: Float[Tensor, "... anchors size"],
    strength: float,
) -> Float[Tensor, "... anchors size"]:
    """Where `dU/dt = -(2 L U + strength (U - F))` ends: `strength (2 L + strength I)^-1 F`.

    A mode of the kernel with eigenvalue mu of 2 L keeps the share `strength / (mu + strength)` of
    the anchor F; the token mean (mu = 0) is kept whole. So the limit is constant exactly where the
    anchor is. At strength 0 it is the limit of the flow that starts at F: the mean over each
    connected part of the kernel.

    Args:
        kernel: weights from 0 up; its symmetric part counts.
        anchor: F.
        strength: lambda of the paper, from 0 up.

    Raises:
        AttoscopeError: for a negative strength or kernel, or shapes that do not fit.

    Source: arXiv 2312.00751, the regularised gradient flow.
    """
    _check_weights(kernel, anchor)
    _check_strength(strength, 0 <= strength < math.inf, "a number from 0 on")
    if bool((kernel < 0).any()):
        raise AttoscopeError("kernel: got negative weights; expected weights from 0 up")
    if strength == 0:
        return _connected(kernel) @ anchor
    eye = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    limit: Tensor = torch.linalg.solve(
        2 * laplacian(kernel) + strength * eye, strength * anchor
    )
    return limit


def stacked_limit(
    attention: Float[Tensor, "... token token"],
    first: Float[Tensor, "... values size"],
    strength: float,
) -> Float[Tensor, "... values size"]:
    """The fixed point of layers `X <- A X + strength (X_0 - X)` that share their attention A.

    `strength ((1 + strength) I - A)^-1 X_0`: a mode with eigenvalue a of A keeps the share
    `strength / (1 + strength - a)` of the first values X_0, and the constant one all of it. For
    uniform attention the frequency ratio ends at `strength / (1 + strength)` of its start. Layers
    reach it where `0 < strength < stability_limit(A)`. There is no residual stream in this, and the
    value map is the identity.

    Raises:
        AttoscopeError: for a strength of 0 or less, at which the limit is not one of X_0 alone;
            for shapes that do not fit.

    Source: derived here for the layer of arXiv 2312.00751.
    """
    _check_weights(attention, first)
    _check_strength(strength, 0 < strength < math.inf, "a number above 0")
    eye = torch.eye(attention.shape[-1], dtype=attention.dtype, device=attention.device)
    fixed: Tensor = torch.linalg.solve((1 + strength) * eye - attention, strength * first)
    return fixed


def stability_limit(attention: Float[Tensor, "... query key"]) -> Float[Tensor, "*heads"]:
    """The strength below which layers that share this attention settle, in float64.

    `min over eigenvalues a of Re a + sqrt(1 - (Im a)^2)`: up to there every eigenvalue of
    `A - strength I` stays inside the unit disc. Where all eigenvalues are real (causal attention,
    or symmetric scores) it is `1 + lambda_min`. From 0 to 2: near 1 for flat attention, smaller
    where tokens look away from themselves, above 1 for causal attention. At the limit differences
    between tokens no longer die out; above it they grow from layer to layer.

    Args:
        attention: rows are queries and sum to 1 or less; without padding.

    Raises:
        AttoscopeError: where that is not so, or it is not square or not finite.

    Source: derived here for the layer of arXiv 2312.00751.
    """
    _check_attention(attention)
    exact = attention.double()
    # Eigenvalues of a triangular matrix may be defective: only its diagonal is exact.
    causal = (exact.triu(1) == 0).all(-1).all(-1)
    own = torch.complex(real := exact.diagonal(dim1=-2, dim2=-1), torch.zeros_like(real))
    values = torch.where(causal[..., None], own, torch.linalg.eigvals(exact))
    return (values.real + (1 - values.imag.square()).clamp(min=0).sqrt()).amin(-1)


def _connected(
    kernel: Float[Tensor, "*heads token token"],
) -> Float[Tensor, "*heads token token"]:
    """The mean over each connected part of the kernel, as a matrix: no eigenvalue to round."""
    tied = (kernel + kernel.mT) > 0
    reached = (tied | torch.eye(tied.shape[-1], dtype=torch.bool, device=tied.device)).to(
        kernel.dtype
    )
    for _ in range(tied.shape[-1].bit_length()):
        reached = (reached @ reached > 0).to(kernel.dtype)
    return reached / reached.sum(-1, keepdim=True)


def _check_weights(weights: Tensor, values: Tensor) -> None:
    queries, keys = weights.shape[-2:]
    if queries != keys:
        raise AttoscopeError(
            f"weights: got {queries} queries and {keys} keys; expected as many: give all tokens of "
            "a self-attention, without a cache"
        )
    if keys != values.shape[-2]:
        raise AttoscopeError(
            f"weights: got {keys} keys and values of {values.shape[-2]} tokens; expected the same "
            "tokens in both"
        )


def _check_same(name: str, given: Tensor, values: Tensor) -> None:
    if given.shape != values.shape:
        raise AttoscopeError(
            f"{name}: got shape {tuple(given.shape)}; expected that of the values, "
            f"{tuple(values.shape)}"
        )


def _check_strength(strength: float, good: bool, expected: str) -> None:
    if not good:
        raise AttoscopeError(f"strength: got {strength}; expected {expected}")


def _check_attention(attention: Tensor) -> None:
    queries, keys = attention.shape[-2:]
    if queries != keys:
        found = f"{queries} queries and {keys} keys"
    elif not bool(attention.isfinite().all()):
        found = "numbers that are not finite"
    elif bool((attention < 0).any()):
        found = "negative weights"
    elif (most := float(attention.double().sum(-1).amax())) > _ROW_SUM:
        found = f"rows that sum to {most:g}"
    else:
        return
    raise AttoscopeError(
        f"attention: got {found}; expected square self-attention whose rows sum to 1, after the "
        "softmax"
    )
