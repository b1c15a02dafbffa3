"""Numbers of single attention rows, in as few passes over the scores as possible.

A pass over (batch, head, row, key) is what measuring costs. Filling with a mask is slow on CPUs
(thirty times an addition), so forbidden keys are made harmless by arithmetic: with
y = top - score, clamped and then multiplied by 0 where forbidden, sums over all keys are sums
over the allowed ones. From y and the weights w follow all the entropies, since
ln w = ln(top weight) - y.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import threshold

from attoscope.trace.rows import Rows

STATISTICS = (
    "normalised_entropy",
    "effective_keys",
    "effective_keys_max",
    "first_share",
    "special_share",
    "content_entropy",
    "margin",
    "undecided",
    "saturated",
    "score_scale",
    "sink_mass",
    "first_even",
    "special_even",
    "margin_random",
    "freezing",
)
# Above every score difference, and its square still finite in float32.
_FAR = 1e18
# Where only probabilities are known, a zero one stands for less than the least float32.
_UNDERFLOW = 104.0
# A row is saturated when float32 cannot hold the runner-up's weight beside the top one's.
_SATURATED = 24 * math.log(2)
# How many times the even share a row's top key must have for the row to count as decided.
_DECIDED = 2.0


def key_kinds(
    valid: Bool[Tensor, "batch key"], special: Bool[Tensor, "batch key"]
) -> Float[Tensor, "batch kind key"]:
    """Indicators of each kind of key: first, special, content (neither), all."""
    first = valid & (valid.cumsum(1) == 1)
    special = special & valid
    content = valid & ~first & ~special
    return torch.stack([first, special, content, torch.ones_like(valid)], 1).float()


def row_statistics(
    rows: Rows, kinds: Float[Tensor, "batch kind key"], *, only_probabilities: bool = False
) -> tuple[Float[Tensor, "statistic batch head row"], Bool[Tensor, "batch head row"]]:
    """`STATISTICS` of each row, NaN where not defined, and which rows are not finite.

    A row with no allowed key has no statistics; entropies need two keys to choose from.
    """
    batch, heads, length, _ = rows.scores.shape
    allowed = rows.allowed.float()
    keys = _by_kind(kinds, allowed).double()
    mass = _by_kind(kinds, rows.weights).double()
    top = rows.scores.amax(-1, keepdim=True)
    far = _UNDERFLOW if only_probabilities else _FAR
    behind = top.sub(rows.scores).clamp_(max=far)
    margin = _margin(behind)
    behind.mul_(allowed)
    spread = _spread(behind, keys[3])
    moment = _by_kind(kinds[:, 2:], behind.mul_(rows.weights)).double()
    top_weight = rows.weights.amax(-1).double()
    lost = (~torch.isfinite(mass[3])) | (~torch.isfinite(spread))
    broken = (lost & (keys[3] > 0)).expand(batch, heads, length)
    statistics = _assemble(keys, mass, moment, top_weight, margin.double(), spread)
    statistics[STATISTICS.index("sink_mass")] = rows.sink_mass
    empty = ((keys[3] < 1) | broken).expand(batch, heads, length)
    return statistics.masked_fill_(empty, math.nan), broken


def _assemble(
    keys: Float[Tensor, "kind batch heads row"],
    mass: Float[Tensor, "kind batch head row"],
    moment: Float[Tensor, "two batch head row"],
    top_weight: Float[Tensor, "batch head row"],
    margin: Float[Tensor, "batch head row"],
    spread: Float[Tensor, "batch head row"],
) -> Float[Tensor, "statistic batch head row"]:
    """The statistics from the sums: small arithmetic, no pass over the keys."""
    first_keys, special_keys, content_keys, all_keys = keys
    entropy = _entropy(moment[1], mass[3], top_weight, all_keys)
    content = _entropy(moment[0], mass[2], top_weight, content_keys)
    peak = top_weight / mass[3]
    two = torch.where(all_keys >= 2, 0.0, math.nan)
    columns = (
        entropy / all_keys.log(),
        entropy.exp(),
        1 / peak,
        mass[0] / mass[3],
        mass[1] / mass[3],
        content / content_keys.log(),
        margin + two,
        torch.where(all_keys >= 3, (peak < _DECIDED / all_keys).double(), math.nan),
        (margin > _SATURATED).double() + two,
        spread + two,
        torch.zeros_like(spread),
        first_keys / all_keys,
        special_keys / all_keys,
        expected_gap(all_keys) * spread + two,
        (2 * all_keys.log()).sqrt() + two,
    )
    return torch.stack([column.expand(spread.shape) for column in columns])


def _by_kind(
    kinds: Float[Tensor, "batch kind key"], values: Float[Tensor, "batch heads row key"]
) -> Float[Tensor, "kind batch heads row"]:
    """Sums over each kind of key: one matrix product, thin on the left (four times faster)."""
    batch, heads, rows, keys = values.shape
    sums = kinds @ values.reshape(batch, heads * rows, keys).transpose(1, 2)
    return sums.transpose(0, 1).reshape(-1, batch, heads, rows)


def _entropy(
    moment: Float[Tensor, "batch head row"],
    mass: Float[Tensor, "batch head row"],
    top_weight: Float[Tensor, "batch head row"],
    keys: Float[Tensor, "batch heads row"],
) -> Float[Tensor, "batch head row"]:
    """Entropy in nats of weights renormalised to 1 over some keys; NaN with fewer than two.

    With w = top_weight exp(-y): -sum (w/m) ln (w/m) = sum(w y)/m - ln(top_weight/m), where
    m = sum w over those keys.
    """
    entropy: Tensor = moment / mass - (top_weight / mass).log()
    defined = (keys >= 2) & (mass > 0)
    return torch.where(defined, entropy.clamp_(min=0.0), math.nan)


def _margin(behind: Float[Tensor, "batch head row key"]) -> Float[Tensor, "batch head row"]:
    """How far the runner-up is behind the top score; 0 where two keys share the top."""
    ties = behind.shape[-1] - behind.sign().sum(-1)
    runner_up = threshold(behind, 0.0, _FAR).amin(-1)
    return torch.where(ties > 1.5, 0.0, runner_up)


def _spread(
    behind: Float[Tensor, "batch head row key"], keys: Float[Tensor, "batch heads row"]
) -> Float[Tensor, "batch head row"]:
    """Standard deviation of a row's scores over its allowed keys (no Bessel correction)."""
    mean = behind.sum(-1).double() / keys
    square = torch.linalg.vector_norm(behind, dim=-1).double().square() / keys
    variance: Tensor = (square - mean.square()).clamp(min=0.0)
    return variance.sqrt()


def expected_gap(keys: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Expected gap between the two largest of `keys` independent standard Gaussian numbers.

    k ∫ F^(k-1) (1-F) dx, tabulated exactly to 64 and on a grid in ln k above (error < 1e-4).
    """
    sizes, gaps = _gap_table()
    found = np.interp(np.log(np.maximum(keys.cpu().numpy(), 1.0)), sizes, gaps)
    return torch.from_numpy(found).to(keys.device)


@lru_cache(maxsize=1)
def _gap_table() -> tuple[np.ndarray, np.ndarray]:
    from scipy.special import log_ndtr, ndtr

    sizes = np.unique(np.concatenate([np.arange(2, 65), np.geomspace(64, 2**22, 120)]))
    x = np.linspace(-9, 9, 4001)
    integrand = np.exp((sizes[:, None] - 1) * log_ndtr(x)) * ndtr(-x)
    gaps = sizes * np.trapezoid(integrand, x, axis=1)
    return np.log(sizes), gaps


def head_write(
    output: Float[Tensor, "batch query head size"],
    weight: Float[Tensor, "head size width"] | None,
    stream: Float[Tensor, "batch query width"] | None,
    positions: Int[Tensor, "batch row"],
) -> Float[Tensor, "batch head row"]:
    """Norm of what each head adds to the stream, relative to the norm of the stream before it.

    |o W_h| is taken as sqrt(o (W_h W_h^T) o), so that nothing of size head × width is made.
    Without the weight (or the stream) it is the norm of the head's output relative to the mean
    over heads.
    """
    batch = torch.arange(len(output), device=output.device)[:, None]
    at = positions.to(output.device)
    # (head, batch × row, size)
    o = output[batch, at].float().flatten(0, 1).transpose(0, 1)
    if weight is None or stream is None:
        square = o.square().sum(-1)
        written = square.sqrt().reshape(output.shape[2], *at.shape)
        return (written / written.mean(0, keepdim=True)).transpose(0, 1)
    w = weight.to(o.device).float()
    square = ((o @ (w @ w.transpose(1, 2))) * o).sum(-1).clamp(min=0.0)
    written = square.sqrt().reshape(output.shape[2], *at.shape).transpose(0, 1)
    at = positions.to(stream.device)
    before = stream[batch.to(stream.device), at].float()
    norms = torch.linalg.vector_norm(before, dim=-1).to(written.device)
    share: Tensor = written / norms[:, None]
    return share
