"""What one attention layer can reach by gradient descent, by which of its weights, and how fast.

All of it is derived here for one layer `F(X) = sum_h S_h X W_h^V W_h^O` with loss
`1/2 |F - y|_F^2`, after the abstract of arXiv 2411.07538; none of it is quoted from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import nnls
from torch import Tensor

from attoscope.errors import AttoscopeError

# Up to so many outputs (rows x output width) the design matrix is made and decomposed whole.
DENSE = 1024


def row_jacobian(
    weights: Float[Tensor, "*lead key"],
    values: Float[Tensor, "*lead key width"],
    kernel: str = "softmax",
) -> Float[Tensor, "*lead width key"]:
    """Derivative of one query's output with respect to its logits.

    Softmax: `V^T (diag(s) - s s^T)`, of rank at most `min(width, keys - 1)`: one direction is lost,
    as all logits may move together. Gaussian, with logits `-|q - k|^2 / (2 sqrt(d))`:
    `V^T diag(s)`, of rank up to `min(width, keys)`.

    Raises `AttoscopeError` for another kernel.
    """
    if kernel not in ("softmax", "gaussian"):
        raise AttoscopeError(f"kernel: got {kernel!r}; expected 'softmax' or 'gaussian'")
    own = values.mT * weights[..., None, :]
    if kernel == "gaussian":
        return own
    return own - own.sum(-1, keepdim=True) * weights[..., None, :]


def softmax_floor(
    values: Float[Tensor, "*sample key width"],
    targets: Float[Tensor, "*samples query widths"],
    *,
    hull: str = "affine",
) -> float:
    """The least loss `1/2 sum |o - y|^2` that softmax attention can have, whatever its logits.

    Its outputs lie in the convex hull of the value rows. "convex" is the infimum itself where every
    query's logits are free (non-negative least squares per query); "affine", from the affine hull,
    is cheaper and at most that. 0 for every target only where `keys - 1 >= width`. Query and key
    weights alone cannot bring the loss below it; training the values can. The unit is that of the
    values, squared.

    Raises `AttoscopeError` for another hull, or samples and widths that do not fit.
    """
    if hull not in ("affine", "convex"):
        raise AttoscopeError(f"hull: got {hull!r}; expected 'affine' or 'convex'")
    if values.shape[:-2] != targets.shape[:-2] or values.shape[-1] != targets.shape[-1]:
        raise AttoscopeError(
            f"targets: got shape {tuple(targets.shape)} for values of {tuple(values.shape)}; "
            "expected the same samples and width"
        )
    if hull == "affine":
        return float(_from_affine(values.double(), targets.double())) / 2
    flat = values.double().reshape(-1, *values.shape[-2:]).numpy()
    wanted = targets.double().reshape(-1, *targets.shape[-2:]).numpy()
    total = sum(_from_convex(v - y) for v, rows in zip(flat, wanted, strict=True) for y in rows)
    return total / 2


def _from_affine(values: Tensor, targets: Tensor) -> Tensor:
    base = values.mean(-2, keepdim=True)
    spread = values - base
    left = targets - base
    _, sizes, directions = torch.linalg.svd(spread, full_matrices=False)
    # Against the values themselves: where all are equal, their differences are rounding.
    inside = directions * (sizes > 1e-12 * values.abs().amax((-2, -1))[..., None])[..., None]
    distance: Tensor = (left - left @ inside.mT @ inside).square().sum()
    return distance


def _from_convex(corners: np.ndarray) -> float:
    """Squared norm of the point of the hull of these rows that is nearest to 0.

    Of `|U^T w|^2 + (sum w - 1)^2` over w >= 0 the minimiser is a multiple of the weights sought:
    along every ray it is `r^2 / (1 + r^2)`, with r the distance of that ray's point of the hull.
    """
    size = np.abs(corners).max()
    if size == 0:
        return 0.0
    rows = np.vstack([corners.T / size, np.ones(len(corners))])
    weights, _ = nnls(rows, np.append(np.zeros(corners.shape[1]), 1.0))
    nearest = weights @ corners / weights.sum()
    return float(nearest @ nearest)


@dataclass(frozen=True, slots=True)
class ValuePath:
    """Least squares by the value weights alone: how well posed it is.

    With B the rows that value weights see, (row, head x width): `rank`, `sigma_min` and `sigma_max`
    of B; `rows` and `features = head x width`. The loss falls by the factor `1 - mu / largest` per
    step of size `1 / largest` at least, if `mu > 0`, and its optimum is then 0 for every target:
    `mu` and `largest` are the extreme eigenvalues of `J J^T` where `exact`, else bounds of them
    (mu from below, 0 where nothing is known; largest from above).
    """

    rows: int
    features: int
    rank: int
    sigma_min: float
    sigma_max: float
    mu: float
    largest: float
    exact: bool

    @property
    def wide_enough(self) -> bool:
        """`HD >= Nn`, without which no B has full row rank."""
        return self.features >= self.rows

    @property
    def free_rate(self) -> float:
        """`(sigma_min / sigma_max)^2`: mu / L where every head's product of value and output matrix
        may be any matrix, from 0 to 1."""
        return (self.sigma_min / self.sigma_max) ** 2 if self.sigma_max > 0 else 0.0

    @property
    def rate(self) -> float:
        """`mu / L`: the share of the loss that a step removes at least, from 0 to 1."""
        return self.mu / self.largest if self.largest > 0 else 0.0


def value_path(
    seen: Float[Tensor, "head row width"],
    output: Float[Tensor, "head size out"],
    *,
    groups: int | None = None,
    precision: float = 2.3e-16,
) -> ValuePath:
    """How well the value weights alone can fit any target, by `J = [S_h X kron (W_h^O)^T]_h`.

    Lower bounds of the least eigenvalue of `J J^T`, of which the larger counts:
    `sigma_min(B)^2 min_h sigma_min(W_h^O)^2`, where `size >= out`, and
    `min_h sigma_min(S_h X)^2 sigma_min(W^O)^2`, where `head x size >= out` (needs `width >= row`).
    Up to 1,024 outputs (rows x out) it is computed itself.

    Args:
        seen: `S_h X`, all samples' queries one after the other.
        output: the output matrix by head.
        groups: how many value heads the heads share; neither bound holds for fewer than heads.
        precision: relative rounding of `seen`, below which singular values count as 0.

    Cost: one singular value decomposition of B, (row, head x width).
    """
    heads, rows, width = seen.shape
    exact, output = seen.double(), output.double()
    joined = exact.transpose(0, 1).reshape(rows, heads * width)
    # A tall matrix by its triangle: the same singular values for a tenth of the work.
    sizes = torch.linalg.svdvals(torch.linalg.qr(joined.mT, mode="r")[1])
    rank = int((sizes > float(sizes.max()) * max(joined.shape) * precision).sum())
    shared = heads if groups is None else groups
    outputs = rows * output.shape[2]
    if outputs <= DENSE:
        values = torch.linalg.svdvals(design(exact, output, shared))
        largest, whole = float(values.max()) ** 2, len(values) == outputs
        real = (
            float(values.min()) > float(values.max()) * max(outputs, heads * width) * precision
        )
        mu = float(values.min()) ** 2 if whole and real else 0.0
    else:
        strongest = float(torch.linalg.svdvals(output).max()) ** 2
        largest = heads // shared * float(sizes.max()) ** 2 * strongest
        mu = lower_bound(exact, output, precision) if shared == heads else 0.0
    return ValuePath(
        rows=rows, features=heads * width, rank=rank,
        sigma_min=float(sizes.min()) if len(sizes) == rows else 0.0,
        sigma_max=float(sizes.max()), mu=mu, largest=largest, exact=outputs <= DENSE,
    )  # fmt: skip


def lower_bound(
    seen: Float[Tensor, "head row width"],
    output: Float[Tensor, "head size out"],
    precision: float = 2.3e-16,
) -> float:
    """The larger of the two lower bounds of `value_path`; 0 where neither says anything."""
    heads, rows, width = seen.shape
    bounds = [0.0]
    if output.shape[1] >= output.shape[2] and heads * width >= rows:
        joined = seen.transpose(0, 1).reshape(rows, heads * width)
        least = torch.linalg.svdvals(output)[:, -1].min()
        bounds.append(_least(joined, precision) * float(least) ** 2)
    whole = output.flatten(0, 1)
    if whole.shape[0] >= whole.shape[1] and width >= rows:
        own = min(_least(each, precision) for each in seen)
        bounds.append(own * float(torch.linalg.svdvals(whole)[-1]) ** 2)
    return max(bounds)


def _least(matrix: Tensor, precision: float) -> float:
    """Squared least singular value; 0 where it is rounding."""
    sizes = torch.linalg.svdvals(matrix)
    real = float(sizes[-1]) > float(sizes[0]) * max(matrix.shape) * precision
    return float(sizes[-1]) ** 2 if real else 0.0


def design(
    seen: Float[Tensor, "head row width"],
    output: Float[Tensor, "head size out"],
    groups: int | None = None,
) -> Float[Tensor, "outputs parameters"]:
    """`J`: derivative of all outputs (row, out) by the value weights (group, width, size)."""
    heads = len(seen)
    groups = heads if groups is None else groups
    each = torch.einsum("hrw,hso->hrows", seen, output)
    joined = each.unflatten(0, (groups, heads // groups)).sum(1)
    matrix: Tensor = joined.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    return matrix
