"""Which eigenvalue wins: spectra of attention and of value-output maps, and what they decide.

One layer with fixed attention A (rows sum to 1) and value-output map H adds `A X H` to the tokens
X, one per row. Its eigenvalues are `1 + a h`, for eigenvalues a of A and h of H (without the
residual stream: `a h`). Repeated, the one of largest modulus wins. Where it uses a = 1, whose
eigenvector is the constant, all tokens become equal; where it uses another, they do not.

Source: arXiv 2401.04301. Proofs hold for one head and the same A and H in every layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Complex, Float, Inexact
from scipy.linalg import issymmetric

from attoscope.errors import AttoscopeError

UNDECIDED = 0.01  # margins below: only hundreds of layers would tell
ROW_SUM = 1e-2
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class AttentionSpectrum:
    """Eigenvalues of one attention map, largest modulus first; none is beyond 1.

    `values[perron]` is the eigenvalue 1 of the constant vector. `smallest` is the least real
    part: below 0 some contrast between tokens changes its sign in every step. `second` is the
    largest modulus of all the others: near 0 one step makes the outputs of all tokens equal.
    """

    values: Complex[np.ndarray, " token"]
    perron: int
    smallest: float
    second: float


def attention_spectrum(attention: Float[np.ndarray, "query key"]) -> AttentionSpectrum:
    """Eigenvalues of an attention map, rows = queries; of causal attention: its diagonal.

    Raises AttoscopeError unless the map is square, of two tokens or more, finite, not negative
    and its rows sum to 1 (within 0.01): cut padding first.
    """
    a = np.asarray(attention, dtype=np.float64)
    _check_attention(a)
    values = _eigenvalues(a)
    perron = int(np.abs(values - 1).argmin())
    others = np.delete(values, perron)
    return AttentionSpectrum(
        values, perron, float(values.real.min()), float(np.abs(others).max())
    )


@dataclass(frozen=True, eq=False)
class ValueOutputSpectrum:
    """The eigenvalues of a head's value-output map H, as many as the head is wide.

    Where the stream is wider than the head, all its other eigenvalues are 0. `largest` and
    `smallest` are real parts; `positive` and `negative` are the shares of the eigenvalues here
    with a real part above and below 0 (neither: 0 up to rounding). `asymmetry` is
    ||H - H^T|| / ||H||, Frobenius: 0 symmetric, sqrt(2) as of a random matrix, 2 at most; NaN
    for H = 0.
    """

    values: Complex[np.ndarray, " size"]
    largest: float
    smallest: float
    positive: float
    negative: float
    asymmetry: float


def value_output_spectrum(
    value: Float[np.ndarray, "width size"],
    output: Float[np.ndarray, "inner outer"],
    gain: Float[np.ndarray, " channel"] | None = None,
    centred: bool = False,
) -> ValueOutputSpectrum:
    """Spectrum of `H = value @ output`, which acts on rows (`X H`), without forming H.

    With the norm in front of attention folded in, `H = C diag(gain) value output`, where C
    takes the mean over channels away if `centred` (LayerNorm; RMSNorm does not). That leaves
    the norm's division, a positive number for each token. Biases do not enter.

    Args:
        value: (width, size), output: (size, width). A torch `Linear` stores the transpose.
        gain: the norm's weight, (width,); negative channels turn the sign of rows of H.

    Raises AttoscopeError for shapes that do not fit and for numbers that are not finite.
    """
    v, o = np.asarray(value, dtype=np.float64), np.asarray(output, dtype=np.float64)
    if o.shape != v.shape[::-1]:
        raise AttoscopeError(
            f"output: got shape {o.shape} for values of shape {v.shape}; expected "
            f"{v.shape[::-1]}: give (width, size) and (size, width)"
        )
    if gain is not None and gain.shape != v.shape[:1]:
        raise AttoscopeError(
            f"gain: got {gain.shape} for a stream of width {len(v)}; expected ({len(v)},)"
        )
    if gain is not None:
        v = np.asarray(gain, dtype=np.float64)[:, None] * v
    if centred:
        v = v - v.mean(0)
    if not (np.isfinite(v).all() and np.isfinite(o).all()):
        raise AttoscopeError("value, output and gain: some numbers are not finite; check them")
    small = o @ v  # its non-zero eigenvalues are those of v @ o
    values = _eigenvalues(small)
    real = np.where(_is_zero(values.real, values), 0.0, values.real)
    return ValueOutputSpectrum(
        values,
        float(real.max()),
        float(real.min()),
        float((real > 0).mean()),
        float((real < 0).mean()),
        _asymmetry(v, o, small),
    )


@dataclass(frozen=True, slots=True)
class Dominance:
    """What a layer does when it is repeated.

    `kind`: "smooths" (all tokens become equal), "sharpens" (they do not, though in general they
    end on one line), "inactive" (what is left after long is the part that H leaves alone) or
    "undecided" (|margin| < 0.01). `perron` and `other` are the largest moduli with the
    eigenvalue 1 of attention and with any other. `margin = ln(perron / other)`: positive
    smooths; it takes about 1 / |margin| layers to show. `oscillates`: the winner is complex, and
    the limit turns within two dimensions.
    """

    kind: Literal["smooths", "sharpens", "inactive", "undecided"]
    margin: float
    perron: float
    other: float
    oscillates: bool


def dominance(
    attention_values: Inexact[np.ndarray, " token"],
    map_values: Inexact[np.ndarray, " value"],
    *,
    residual: bool = True,
    wider: bool = False,
) -> Dominance:
    """Which product of eigenvalues wins, `1 + a h` or, without a residual stream, `a h`.

    Args:
        attention_values: all eigenvalues a of the attention map; the one nearest 1 is Perron's.
        map_values: eigenvalues h of the value-output map, in units of what the layer reads.
        wider: the stream is wider than the head, so that 0 is an eigenvalue of H as well: with
            a residual stream 1 then competes on both sides.

    Raises AttoscopeError where there are fewer than two a, no h, or numbers that are not finite.
    """
    a = np.asarray(attention_values, dtype=np.complex128)
    h = np.asarray(map_values, dtype=np.complex128)
    _check_values(a, h)
    if wider:
        h = np.append(h, 0.0)
    products = np.outer(a, h) + (1.0 if residual else 0.0)
    moduli = np.abs(products)
    perron = int(np.abs(a - 1).argmin())
    p, o = float(moduli[perron].max()), float(np.delete(moduli, perron, 0).max())
    winner = products.flat[moduli.argmax()]
    margin = _log_ratio(p, o)
    return Dominance(
        _kind(p, o, margin, bool(_is_zero(h, h).any()), residual),
        margin,
        p,
        o,
        bool(abs(winner.imag) > 1e-9 * abs(winner)),
    )


def smoothing_threshold(smallest: float) -> float:
    """`-2 / (1 + smallest)`: for H = h I, tokens become equal iff h > 0 or h is below this.

    For attention with real eigenvalues, of which `smallest` is the least (-1 to 1). The result
    runs from -1 down to -inf, which `smallest = -1` gives: no negative h smooths.

    Raises AttoscopeError for a `smallest` outside -1 to 1.
    """
    if not -1.0 <= smallest <= 1.0:
        raise AttoscopeError(
            f"smallest: got {smallest:g}; expected an eigenvalue of an attention map, from -1 "
            "to 1"
        )
    return -math.inf if smallest == -1.0 else -2.0 / (1.0 + smallest)


def _eigenvalues(matrix: Float[np.ndarray, "n n"]) -> Complex[np.ndarray, " n"]:
    """Largest modulus first. Of a triangular matrix (causal attention) exactly the diagonal."""
    if issymmetric(matrix):
        values = np.linalg.eigvalsh(matrix).astype(np.complex128)
    else:
        values = np.linalg.eigvals(matrix).astype(np.complex128)
    return values[np.argsort(-np.abs(values), kind="stable")]


def _is_zero(part: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Which parts of the eigenvalues cannot be told from 0, given the largest of them."""
    return np.asarray(np.abs(part) <= len(values) * _EPS * np.abs(values).max())


def _asymmetry(v: np.ndarray, o: np.ndarray, small: np.ndarray) -> float:
    """||H - H^T|| / ||H|| = sqrt(2 - 2 tr(H H) / ||H||^2), from matrices of the head's size."""
    energy = float(((v.T @ v) * (o @ o.T)).sum())
    if energy <= 0:
        return math.nan
    return math.sqrt(max(0.0, 2 - 2 * float((small * small.T).sum()) / energy))


def _log_ratio(p: float, o: float) -> float:
    if p == o:
        return 0.0
    return math.log(p / o) if min(p, o) > 0 else math.copysign(math.inf, p - o)


def _kind(
    p: float, o: float, margin: float, singular: bool, residual: bool
) -> Literal["smooths", "sharpens", "inactive", "undecided"]:
    rest = 1 + 1e-12 if residual else 0.0
    if singular and max(p, o) <= rest:
        return "inactive"
    if abs(margin) < UNDECIDED:
        return "undecided"
    return "smooths" if margin > 0 else "sharpens"


def _check_attention(a: np.ndarray) -> None:
    if a.shape[0] != a.shape[1] or len(a) < 2:
        raise AttoscopeError(
            f"attention: got shape {a.shape}; expected a square map of two tokens or more: cut "
            "padding from queries and keys alike"
        )
    if not np.isfinite(a).all() or (a < 0).any():
        raise AttoscopeError(
            "attention: some weights are negative or not finite; expected softmax weights"
        )
    worst = int(np.abs(a.sum(1) - 1).argmax())
    if abs(a[worst].sum() - 1) > ROW_SUM:
        raise AttoscopeError(
            f"attention: row {worst} sums to {a[worst].sum():.4g}; expected rows that sum to 1: "
            "cut padding, and divide rows by their sum where a sink takes a share"
        )


def _check_values(a: np.ndarray, h: np.ndarray) -> None:
    if len(a) < 2 or len(h) < 1:
        raise AttoscopeError(
            f"dominance: got {len(a)} eigenvalues of attention and {len(h)} of the map; expected "
            "at least two and one"
        )
    if not (np.isfinite(a).all() and np.isfinite(h).all()):
        raise AttoscopeError("dominance: some eigenvalues are not finite; check the weights")
