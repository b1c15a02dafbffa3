"""Mean, variance and token covariance through the components of a Transformer, in closed form.

Forward, x is a tensor of tokens whose entries have one mean and one variance, and two different
tokens of a document one covariance at the same feature; features are uncorrelated. Backward, a
gradient is such a tensor with mean 0, independent of x and of the weights. Weights are
independent, N(0, variance), biases 0. All is an average over weights, features, tokens and
documents. `*_backward` give the gradient at the input from that at the output.

Source: DeepScaleLM (arXiv 2403.09635) and its simulations. RMSNorm, gated activations, SiLU,
causal attention and the corrected attention gradient are derived here; each says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from attoscope.errors import AttoscopeError
from attoscope.moments.curves import KNOWN, curve_moments

# Beyond this exponent no softmax formula for small scores says anything; keeps exp finite.
_LARGEST = 50.0


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of a tensor of tokens: of one entry, and of two different tokens at one feature.

    Raises AttoscopeError unless all are finite, the variance is not negative and the covariance
    is within it (up to rounding).
    """

    mean: float
    variance: float
    covariance: float

    def __post_init__(self) -> None:
        values = (self.mean, self.variance, self.covariance)
        if not all(map(math.isfinite, values)) or self.variance < 0:
            raise AttoscopeError(
                f"moments: got mean {self.mean}, variance {self.variance}, covariance "
                f"{self.covariance}; expected finite numbers and a variance from 0 on"
            )
        if abs(self.covariance) > self.variance * (1 + 1e-6) + 1e-300:
            raise AttoscopeError(
                f"covariance: got {self.covariance} for a variance of {self.variance}; expected "
                "it between minus and plus the variance: give a covariance, not a correlation"
            )

    @property
    def correlation(self) -> float:
        """r of two different tokens, -1 to 1; 1: all tokens equal. 0 for a variance of 0."""
        return min(1.0, max(-1.0, self.covariance / self.variance)) if self.variance else 0.0

    def scaled(self, factor: float) -> Moments:
        """Those of the tensor times a number."""
        square = factor**2
        return Moments(factor * self.mean, square * self.variance, square * self.covariance)


def of(variance: float, correlation: float) -> Moments:
    """Moments with mean 0, from a variance and a token correlation."""
    return Moments(0.0, variance, correlation * variance)


def embedding(frequencies: np.ndarray, variance: float, tables: int, segments: int) -> Moments:
    """A sum of `tables` embeddings with entries N(0, variance): token, position, segment.

    Tokens are drawn with `frequencies`, (vocabulary,), which give them in common sum p^2; with two
    `segments`, whose boundary is uniform, two tokens share one with probability 2/3; 0 or 1: there
    is no segment table. Positions have nothing in common.
    """
    p = np.asarray(frequencies, dtype=np.float64)
    if p.min() < 0 or abs(p.sum() - 1) > 1e-6:
        raise AttoscopeError(
            f"frequencies: got a sum of {p.sum():.6g} and a least value of {p.min():.3g}; expected "
            "probabilities that sum to 1: divide by the sum"
        )
    if segments not in (0, 1, 2):
        raise AttoscopeError(f"segments: got {segments}; expected 0, 1 or 2")
    shared = float(p @ p) + (2 / 3 if segments == 2 else 0.0)
    return Moments(0.0, tables * variance, variance * shared)


def zipf_frequencies(vocabulary: int) -> np.ndarray:
    """Probabilities proportional to 1/rank, (vocabulary,)."""
    p = 1 / np.arange(1.0, vocabulary + 1)
    return np.asarray(p / p.sum())


def linear(x: Moments, inputs: int, weight: float) -> Moments:
    """A linear map whose weights have this variance: `inputs weight (variance + mean^2)`."""
    size, square = inputs * weight, x.mean**2
    return Moments(0.0, size * (x.variance + square), size * (x.covariance + square))


def linear_backward(gradient: Moments, outputs: int, weight: float) -> Moments:
    """`outputs weight` times the gradient's variance and covariance."""
    size = outputs * weight
    return Moments(0.0, size * gradient.variance, size * gradient.covariance)


def kappa(r: float) -> float:
    """`E[relu u relu v] / E[relu^2]` of standard normals with correlation r; 1/pi at 0, 1 at 1."""
    r = min(1.0, max(-1.0, r))
    return r + (math.sqrt(1 - r * r) - r * math.acos(r)) / math.pi


def relu(x: Moments) -> Moments:
    """ReLU of a Gaussian x with mean 0 (else AttoscopeError)."""
    _centred(x, "relu")
    square = x.variance / (2 * math.pi)
    return Moments(
        math.sqrt(square),
        x.variance / 2 - square,
        x.variance / 2 * kappa(x.correlation) - square,
    )


def relu_backward(gradient: Moments, x: Moments) -> Moments:
    """`g/2`, and `r_g g (1/4 + arcsin(r) / (2 pi))`."""
    both = 0.25 + math.asin(x.correlation) / (2 * math.pi)
    return Moments(0.0, gradient.variance / 2, gradient.covariance * both)


def _gelu_product(s: float, r: float) -> float:
    """`E[gelu(u) gelu(v)]`, both of variance s."""
    more = (
        s * (s * (1 - r * r) + 1 + r * r) / ((s + 1) * math.sqrt((s + 1) ** 2 - (r * s) ** 2))
    )
    return s / 4 * (r + 2 / math.pi * (r * math.asin(r * s / (1 + s)) + more))


def _gelu_slopes(s: float, r: float) -> float:
    """`E[gelu'(u) gelu'(v)]`, both of variance s."""
    a = r * s / (1 + s)
    bent = (s + 1) * (2 * s + 3) - 2 * (r * s) ** 2
    last = a * bent / ((s + 1) ** 2 - (r * s) ** 2) ** 1.5
    return float(0.5 + (last - math.acos(a)) / (2 * math.pi))


def gelu(x: Moments) -> Moments:
    """GELU (by erf) of a Gaussian x with mean 0 (else AttoscopeError)."""
    _centred(x, "gelu")
    s = x.variance
    mean = s / math.sqrt(2 * math.pi * (1 + s))
    both = _gelu_product(s, x.correlation)
    return Moments(mean, _gelu_product(s, 1.0) - mean**2, both - mean**2)


def gelu_backward(gradient: Moments, x: Moments) -> Moments:
    """Variance and covariance times `E[gelu'(u) gelu'(v)]`."""
    s = x.variance
    return Moments(
        0.0,
        gradient.variance * _gelu_slopes(s, 1.0),
        gradient.covariance * _gelu_slopes(s, x.correlation),
    )


@dataclass(frozen=True, slots=True)
class _Products:
    """`E f(u)^2`, `E f(u) f(v)`, and the same of the slope."""

    square: float
    both: float
    slope_square: float
    slope_both: float


def _products(name: str, x: Moments) -> _Products:
    s, r = x.variance, x.correlation
    if name == "relu":
        return _Products(s / 2, s / 2 * kappa(r), 0.5, 0.25 + math.asin(r) / (2 * math.pi))
    if name == "gelu":
        one, two = _gelu_product(s, 1.0), _gelu_product(s, r)
        return _Products(one, two, _gelu_slopes(s, 1.0), _gelu_slopes(s, r))
    if name not in KNOWN:
        raise AttoscopeError(
            f"activation: got {name!r}; expected one of {', '.join(sorted(KNOWN))}"
        )
    f = curve_moments(name, s, np.array(r))
    return _Products(f.square, float(f.product), f.slope_square, float(f.slope_product))


def activation(name: str, x: Moments) -> Moments:
    """Uncentred moments of a known activation: mean 0, and second moments in place of variances.

    A linear map behind it with weights of mean 0 asks for no more: `linear` of this is that of the
    true moments. Ours but for "relu" and "gelu": "silu", "quick_gelu", "tanh" by quadrature.
    """
    f = _products(name, x)
    return Moments(0.0, f.square, f.both)


def activation_backward(name: str, gradient: Moments, x: Moments) -> Moments:
    """The gradient through a known activation: times `E f'(u) f'(v)`."""
    f = _products(name, x)
    return Moments(0.0, gradient.variance * f.slope_square, gradient.covariance * f.slope_both)


def gated(name: str, gate: Moments, x: Moments) -> Moments:
    """`f(gate) x` for independent Gaussian gate and x with mean 0 (ours): moments multiply."""
    _centred(gate, f"gated {name}")
    _centred(x, f"gated {name}")
    f = _products(name, gate)
    return Moments(0.0, f.square * x.variance, f.both * x.covariance)


def gated_backward(
    name: str, gradient: Moments, gate: Moments, x: Moments
) -> tuple[Moments, Moments]:
    """The gradients at gate and x (ours): `g x f'(gate)` and `g f(gate)`."""
    f = _products(name, gate)
    at_gate = Moments(
        0.0,
        gradient.variance * x.variance * f.slope_square,
        gradient.covariance * x.correlation * x.variance * f.slope_both,
    )
    at_x = Moments(0.0, gradient.variance * f.square, gradient.covariance * f.both)
    return at_gate, at_x


def swiglu(gate: Moments, x: Moments) -> Moments:
    """`silu(gate) x`: see `gated`."""
    return gated("silu", gate, x)


def swiglu_backward(gradient: Moments, gate: Moments, x: Moments) -> tuple[Moments, Moments]:
    """The gradients at gate and x: see `gated_backward`."""
    return gated_backward("silu", gradient, gate, x)


def layer_norm(x: Moments, width: int | None = None, *, official: bool = False) -> Moments:
    """LayerNorm without gain and bias: mean 0, variance 1, correlation r.

    With a `width` d the correlation is `r [1 - (1 - r^2) / (2 (d - 1))]` (ours), or for `official`
    the simulations' `r (1 - 1/d)`.
    """
    _spread(x)
    r = x.correlation
    if width is not None:
        r *= 1 - 1 / width if official else 1 - (1 - r * r) / (2 * (width - 1))
    return Moments(0.0, 1.0, r)


def layer_norm_backward(gradient: Moments, x: Moments, width: int | None = None) -> Moments:
    """The gradient over the variance of x; with a width d, `(d-2)/(d-3)` of it, exact for a
    Gaussian x (ours; the covariance without)."""
    _spread(x)
    exact = 1.0 if width is None else (width - 2) / (width - 3)
    s = x.variance
    return Moments(0.0, exact * gradient.variance / s, gradient.covariance / s)


def rms_norm(x: Moments, width: int | None = None) -> Moments:
    """RMSNorm without gain (ours): all over the root of `variance + mean^2`.

    With a `width` d and mean 0 the correlation is `r [1 - (1 - r^2) / (2 d)]`.
    """
    _spread(x)
    square = x.variance + x.mean**2
    r = x.covariance
    if width is not None and x.mean == 0:
        r *= 1 - (1 - x.correlation**2) / (2 * width)
    return Moments(x.mean / math.sqrt(square), x.variance / square, r / square)


def rms_norm_backward(gradient: Moments, x: Moments, width: int | None = None) -> Moments:
    """The gradient over `variance + mean^2`; with a width d, `(d-1)/(d-2)` of it, exact for a
    Gaussian x with mean 0 (ours; the covariance without)."""
    _spread(x)
    exact = 1.0 if width is None else (width - 1) / (width - 2)
    square = x.variance + x.mean**2
    return Moments(0.0, exact * gradient.variance / square, gradient.covariance / square)


def dropout(x: Moments, rate: float) -> Moments:
    """Inverted dropout: variance `(s + p mean^2) / (1 - p)`, mean and covariance as they are."""
    _rate(rate)
    return Moments(x.mean, (x.variance + rate * x.mean**2) / (1 - rate), x.covariance)


def dropout_backward(gradient: Moments, rate: float) -> Moments:
    """Variance over `1 - p`, covariance as it is."""
    return dropout(gradient, rate)


def residual(x: Moments, branch: Moments, skip: float = 1.0, scale: float = 1.0) -> Moments:
    """`skip x + scale branch`, independent: moments add. Gradients add in the same way."""
    a, b = x.scaled(skip), branch.scaled(scale)
    return Moments(a.mean + b.mean, a.variance + b.variance, a.covariance + b.covariance)


def softmax(
    variance: float, length: int, correlation: float = 0.0, *, long: bool = False
) -> Moments:
    """A softmax over `length` scores with this variance and correlation along the keys.

    Mean 1/L; with `t = (1 - r) variance`, variance `(e^t - 1) / L^2`, or for `long`
    `e^{2u} (e^u - 1) / ((L - 1) e^t + 1)^2`, `u = t L / (L - 1)`. Both are too large for scores
    that spread: by under 0.4 % for t up to 0.1, 3 % at 1, 12 to 29 % at 2. The covariance is
    not given: 0.
    """
    t = (1 - correlation) * variance
    if long:
        u = t * length / (length - 1)
        spread = _exp(2 * u) * math.expm1(min(u, _LARGEST)) / ((length - 1) * _exp(t) + 1) ** 2
    else:
        spread = math.expm1(min(t, _LARGEST)) / length**2
    return Moments(1 / length, spread, 0.0)


def softmax_backward(
    gradient: float,
    variance: float,
    length: int,
    correlation: float = 0.0,
    *,
    long: bool = False,
) -> float:
    """Variance of the gradient at the scores, for one that is uncorrelated along the keys."""
    made = softmax(variance, length, correlation, long=long)
    return gradient * (made.variance + made.mean**2)


def fixed_point(dropout: float, *, attention: float = 0.5) -> float:
    """Where token correlation settles under small residual steps of ReLU MLPs and attention.

    The root in [0, 1] of `r = (1 - p) [a + (1 - a) kappa(r)]`, a the share of `attention` in the
    branches' variance: 1 - p for a = 1; without dropout 1, rank collapse. Attention dropout is
    left out.
    """
    _rate(dropout)
    if not 0 <= attention <= 1:
        raise AttoscopeError(f"attention: got {attention}; expected a share from 0 to 1")
    if dropout == 0:
        return 1.0  # kappa(1) = 1, and kappa(r) > r below
    return float(
        brentq(
            lambda r: (1 - dropout) * (attention + (1 - attention) * kappa(r)) - r,
            0.0, 1.0, xtol=1e-14,
        )
    )  # fmt: skip


def _exp(x: float) -> float:
    return math.exp(min(x, _LARGEST))


def _centred(x: Moments, name: str) -> None:
    if abs(x.mean) > 1e-9 * math.sqrt(x.variance):
        raise AttoscopeError(
            f"{name}: got an input with mean {x.mean:g}; expected mean 0, as behind a linear map"
        )


def _spread(x: Moments) -> None:
    if x.variance == 0:
        raise AttoscopeError("norm: got an input of variance 0; expected one that varies")


def _rate(rate: float) -> None:
    if not 0 <= rate < 1:
        raise AttoscopeError(f"dropout: got {rate}; expected a rate from 0 to below 1")
