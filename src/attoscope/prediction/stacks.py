"""Stacks of attention layers: with fixed maps, iterated and predicted; and untrained ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Complex, Float
from scipy.linalg import issymmetric
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs
from scipy.special import softmax

from attoscope.errors import AttoscopeError
from attoscope.measures.smoothness import family, spectrum

Array = Float[np.ndarray, "..."]
Factors = tuple[Float[np.ndarray, "head width size"], Float[np.ndarray, "head size width"]]
Maps = Literal["free", "smooth", "sharpen", "mixed"]
Anchor = Literal["first", "zero", "mean"]
_DENSE = 100
_NORM_EPS = 1e-5  # as in torch.nn.LayerNorm


def iterate_fixed(
    attention: Float[np.ndarray, "*#batch n n"],
    value_map: Float[np.ndarray, "*#batch d d"],
    x: Float[np.ndarray, "*#batch n d"],
    layers: int,
    *,
    residual: bool = True,
    renormalise: bool = True,
) -> Float[np.ndarray, "*out n d"]:
    """The tokens after this many layers `X <- X + A X H` (without a residual stream `A X H`).

    With `renormalise` X is divided by its Frobenius norm after each layer, which leaves its
    direction; a matrix that becomes exactly 0 stays 0. Leading axes run side by side and
    broadcast; a second call goes on where the first ended.
    """
    x = np.asarray(x, dtype=np.float64)
    for _ in range(layers):
        update = attention @ x @ value_map
        x = x + update if residual else update
        if renormalise:
            size = np.linalg.norm(x, axis=(-2, -1), keepdims=True)
            x = np.divide(x, size, out=np.zeros_like(x), where=size > 0)
    return x


def frequency_ratio(x: Float[np.ndarray, "*batch n d"]) -> Float[np.ndarray, "*batch"]:
    """`|(I-J) X| / |J X|`: 0 where all tokens are equal, infinite where their mean is 0.

    The mean is taken from every token first, so that ratios far below 1e-8 are right as well;
    NaN for X = 0.
    """
    mean = x.mean(-2, keepdims=True)
    high = np.linalg.norm(x - mean, axis=(-2, -1))
    low = np.sqrt(x.shape[-2]) * np.linalg.norm(mean, axis=(-2, -1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(high / low)


@dataclass(frozen=True, eq=False)
class Limit:
    """Where the direction of X goes under a layer that is repeated without end.

    `direction` (n, d), of norm 1: the part of X_0 that belongs to the winning `eigenvalue`
    of the layer. With a real winner X_L / |X_L| tends to it, up to sign, and it is real. With a
    complex one X_L turns between its real and imaginary part. `unique` says whether no other
    eigenvalue (the conjugate apart) has the same modulus; where one has, neither is the limit.
    """

    direction: Complex[np.ndarray, "n d"]
    eigenvalue: complex
    unique: bool


def predict_limit(
    attention: Float[np.ndarray, "n n"],
    value_map: Float[np.ndarray, "d d"],
    x: Float[np.ndarray, "n d"],
    *,
    residual: bool = True,
) -> Limit:
    """The limit of `iterate_fixed` by eigenvalues: `v w^T` for a single winning pair (a, h).

    v is the right eigenvector of A, w^T the left one of H. Pairs that X_0 has no part in (below
    1e-12 of the largest) do not take part.

    Raises AttoscopeError where A or H has no full set of eigenvectors, as causal attention with
    equal numbers on its diagonal, and for X = 0.
    Source: arXiv 2401.04301; expansion `X_L = sum_ij (1 + a_i h_j)^L v_i c_ij w_j^T`.
    """
    a, v = _eigenvectors("attention", attention)
    h, w = _eigenvectors("value_map", value_map)
    products = np.outer(a, h) + (1.0 if residual else 0.0)
    parts = np.linalg.solve(v, x) @ w
    size = np.abs(parts)
    if size.max(initial=0.0) == 0:
        raise AttoscopeError("x: all tokens are 0, so they have no direction; give others")
    moduli = np.where(size > 1e-12 * size.max(), np.abs(products), -1.0)
    winner = complex(products.flat[moduli.argmax()])
    close = 1e-9 * max(1.0, abs(winner))
    same = (np.abs(products - winner) < close) & (moduli >= 0)
    direction = v @ np.linalg.solve(w.T, (same * parts).T).T
    if abs(winner.imag) < close:
        direction = direction.real
    rivals = (moduli > abs(winner) - close) & ~same
    rivals &= np.abs(products - winner.conjugate()) >= close
    return Limit(
        (direction / np.linalg.norm(direction)).astype(np.complex128),
        winner,
        not rivals.any(),
    )


def _eigenvectors(name: str, matrix: Float[np.ndarray, "n n"]) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = (np.linalg.eigh if issymmetric(matrix) else np.linalg.eig)(matrix)
    if np.linalg.cond(vectors) > 1e10:
        raise AttoscopeError(
            f"{name}: its eigenvectors do not span the space (up to rounding), so the limit "
            "cannot be read from them; iterate it instead"
        )
    return values, vectors


@dataclass(frozen=True, slots=True)
class DcShare:
    """What wins in a whole layer of several heads, repeated.

    `share`: |J V|^2 / |V|^2 of the leading eigenvector V as (token, channel) matrix: 1 where
    all its tokens are equal (smoothing), 0 where their mean is 0. `eigenvalue` is V's own.
    `margin`: log of its modulus over that of the next one (the conjugate apart). Near 0
    the leading vector is not defined, and neither is the share; 0 where nothing grows and
    what the layer leaves alone (eigenvalue 1) is all that stays.
    """

    share: float
    eigenvalue: complex
    margin: float


def operator_dc_share(
    attentions: Float[np.ndarray, "head n n"],
    maps: Float[np.ndarray, "head d d"] | Factors,
    *,
    residual: bool = True,
    max_iterations: int = 1000,
) -> DcShare:
    """The leading eigenvector of `X -> X + sum_h A_h X H_h`, exact for several heads.

    The maps of heads do not commute in general, so no product of eigenvalues gives this.
    Computed without the n d x n d matrix (Arnoldi); one step costs n d (n + d) per head, or
    n d (n + 2 size) with factors.

    Args:
        attentions: (head, n, n). maps: (head, d, d), or the pair of (head, d, size) values and
            (head, size, d) outputs.

    Raises AttoscopeError where the iteration does not settle: then several eigenvalues are
    nearly as large.
    """
    values, outputs = maps if isinstance(maps, tuple) else (maps, None)
    n, d = attentions.shape[1], values.shape[1]

    def apply(flat: np.ndarray) -> np.ndarray:
        x = flat.reshape(n, d)
        moved = attentions @ (x @ values)
        update = (moved if outputs is None else moved @ outputs).sum(0)
        return np.asarray((x + update if residual else update).ravel())

    found, vectors = _leading(apply, n * d, max_iterations)
    order = np.argsort(-np.abs(found), kind="stable")
    found, vector = found[order], vectors[:, order[0]].reshape(n, d)
    share = n * float((np.abs(vector.mean(0)) ** 2).sum() / (np.abs(vector) ** 2).sum())
    margin = _margin(found)
    if residual and abs(found[0] - 1) < 1e-9:
        margin = 0.0
    return DcShare(share, complex(found[0]), margin)


def _margin(values: np.ndarray) -> float:
    """ln of the first modulus over the next one's, leaving out the conjugate of the first."""
    top, others = values[0], values[1:]
    # Two nearly real numbers are a double eigenvalue that rounding has split, not a pair.
    if abs(top.imag) > 1e-6 * abs(top):
        others = others[np.abs(others - top.conj()) > 1e-9 * abs(top)]
    rest = float(np.abs(others).max(initial=0.0))
    if rest == 0.0:
        return math.inf if abs(top) > 0 else 0.0
    return math.log(abs(top) / rest)


def _leading(
    apply: Callable[[np.ndarray], np.ndarray], size: int, max_iterations: int
) -> tuple[np.ndarray, np.ndarray]:
    """A few eigenpairs of largest modulus; small operators are written out whole."""
    if size <= _DENSE:
        return np.linalg.eig(np.stack([apply(row) for row in np.eye(size)], 1))
    operator = LinearOperator((size, size), matvec=apply, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    try:
        found: tuple[np.ndarray, np.ndarray] = eigs(
            operator, k=4, which="LM", v0=start, maxiter=max_iterations
        )
    except ArpackNoConvergence as error:
        raise AttoscopeError(
            f"the leading eigenvalue did not settle in {max_iterations} restarts, so several are "
            "nearly as large and no one wins; allow more of them or use fewer tokens"
        ) from error
    return found


def random_row_stochastic(
    rng: np.random.Generator, tokens: int, *, temperature: float = 1.0
) -> Float[np.ndarray, "n n"]:
    """Softmax over rows of Gaussian scores / temperature; not symmetric."""
    return np.asarray(softmax(rng.standard_normal((tokens, tokens)) / temperature, axis=1))


def symmetric_row_stochastic(tokens: int, own: float) -> Float[np.ndarray, "n n"]:
    """`own I + (1 - own) J`: eigenvalue 1 of the constant, `own` of all else; own in [0, 1]."""
    if not 0.0 <= own <= 1.0:
        raise AttoscopeError(f"own: got {own:g}; expected a share from 0 to 1")
    return own * np.eye(tokens) + (1.0 - own) / tokens


def map_from_spectrum(
    rng: np.random.Generator, values: Float[np.ndarray, " d"], *, orthogonal: bool = True
) -> Float[np.ndarray, "d d"]:
    """`V diag(values) V^-1` with a random V: orthogonal (then symmetric), or Gaussian."""
    v = rng.standard_normal((len(values), len(values)))
    if orthogonal:
        v, _ = np.linalg.qr(v)
        return np.asarray((v * values) @ v.T)
    return np.asarray(np.linalg.solve(v.T, (v * values).T).T)


@dataclass(frozen=True, eq=False)
class StackProfile:
    """How alike the tokens are as they enter the stack and after each layer: (layers + 1,) each.

    `cosine`: mean over pairs of tokens, from -1/(n-1) to 1 (all the same direction).
    `absolute_cosine`: the same of |cosine|; 1 where tokens lie on one line, with either sign.
    `frequency_ratio`: |(I-J) X| / |J X|, 0 where all tokens are equal; values below 3e-8 are 0.
    `effective_rank`: exp(entropy of the singular values), from 1 to the smaller dimension.
    """

    cosine: Float[np.ndarray, " point"]
    absolute_cosine: Float[np.ndarray, " point"]
    frequency_ratio: Float[np.ndarray, " point"]
    effective_rank: Float[np.ndarray, " point"]


def untrained_stack(
    rng: np.random.Generator,
    *,
    tokens: int = 32,
    width: int = 48,
    heads: int = 3,
    layers: int = 48,
    maps: Maps = "free",
    gamma: float = 1.0,
    strength: float = 0.0,
    anchor: Anchor | None = "first",
    residual: bool = True,
) -> StackProfile:
    """A pre-norm stack of multi-head attention alone, with fresh weights in every layer.

    `X <- X + concat_h(A_h V_h + strength (F_h - V_h)) W_proj`, with `V = gamma norm(X) W_V`, the
    norm without affine, and `A_h` softmax attention. X_0 and W_Q, W_K ~ N(0, 1/width) (X_0: 1).
    All options share the draws of one generator, so stacks of one seed can be compared.

    Args:
        maps: "free" has Gaussian W_V and W_proj. The others have `W_V = Q` (orthogonal) and
            `W_proj = diag(psi) Q^T`, so that W_V W_proj has the eigenvalues psi: from U(0, 1)
            ("smooth"), -U(0, 1) ("sharpen") or U(-1, 1) ("mixed").
        gamma: gain of the norm in front; -1 turns the sign of every eigenvalue.
        strength: of the NeuTRENO term, in all layers but the first.
        anchor: what the term pulls to: the values F of the "first" layer, "zero", or the "mean"
            of the first layer's values over tokens. None leaves the term out.
        residual: whether X is added to each update.

    Raises AttoscopeError where sizes or names are not possible.
    Source: arXiv 2401.04301 (value-output spectra), 2312.00751 (the term).
    """
    _check_stack(tokens, width, heads, layers, maps, anchor)
    x = rng.standard_normal((tokens, width))
    points, first = [x], None
    for _ in range(layers):
        query, key, value, output = _weights(rng, width, maps)
        normed = gamma * _layer_norm(x)
        mixing = _attention(normed @ query, normed @ key, heads)
        values = normed @ value
        update = _merged(mixing @ _split(values, heads))
        if first is None:
            first = values
        elif anchor is not None:
            update = update + strength * (_ANCHORS[anchor](first) - values)
        update = update @ output
        x = x + update if residual else update
        points.append(x)
    return stack_profile(np.stack(points))


def stack_profile(points: Float[np.ndarray, "point token width"]) -> StackProfile:
    """The measures of `StackProfile` for each of several token matrices."""
    x = torch.from_numpy(np.asarray(points, dtype=np.float64))
    everyone = torch.ones(x.shape[:2], dtype=torch.bool)
    cosine, ratio, _ = family(x, everyone).numpy()
    absolute, _, rank, _, _ = spectrum(x, everyone).numpy()
    return StackProfile(cosine, absolute, ratio, rank)


_ANCHORS: dict[str, Callable[[Array], Array]] = {
    "first": lambda values: values,
    "zero": np.zeros_like,
    "mean": lambda values: values.mean(0, keepdims=True),
}


def _weights(rng: np.random.Generator, width: int, maps: Maps) -> tuple[Array, ...]:
    """W_Q, W_K, W_V and W_proj; the draws are the same whatever the maps."""
    query, key, value, output = rng.standard_normal((4, width, width)) / width**0.5
    psi = rng.uniform(size=width)
    if maps == "free":
        return query, key, value, output
    q, r = np.linalg.qr(value)
    q = q * np.sign(r.diagonal())  # uniform over all orthogonal matrices only with these signs
    psi = {"smooth": psi, "sharpen": -psi, "mixed": 2 * psi - 1}[maps]
    return query, key, q, psi[:, None] * q.T


def _layer_norm(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt(x.var(-1, keepdims=True) + _NORM_EPS))


def _split(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def _merged(x: Array) -> Array:
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def _attention(queries: Array, keys: Array, heads: int) -> Array:
    """Softmax attention of each head, (head, query, key)."""
    q, k = _split(queries, heads), _split(keys, heads)
    return np.asarray(softmax(q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5, axis=-1))


def _check_stack(
    tokens: int, width: int, heads: int, layers: int, maps: str, anchor: str | None
) -> None:
    if min(tokens - 1, width, heads, layers) < 1:
        raise AttoscopeError(
            f"untrained_stack: got tokens={tokens}, width={width}, heads={heads}, "
            f"layers={layers}; expected at least two tokens, and one of the others"
        )
    if width % heads:
        raise AttoscopeError(
            f"heads: got {heads} for a width of {width}; expected a number that divides it"
        )
    for name, given, known in (("maps", maps, get_args(Maps)), ("anchor", anchor, _ANCHORS)):
        if given not in known and not (name == "anchor" and given is None):
            raise AttoscopeError(f"{name}: got {given!r}; expected one of {', '.join(known)}")
