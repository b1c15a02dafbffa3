"""When a reading is an alarm, and why there: fixed limits, and jumps out of the run's own past.

*Limits* come from what a number means, or from a paper; none was fitted to runs.

*Jumps* ask whether a reading left the range of the run's own last looks: beyond their median by
more than six robust standard deviations (1.4826 times the median absolute deviation; a Gaussian
does that once in 5e8 looks) and by more than a factor of two (so that a reading which hardly moves
has to do something that matters). In logarithms, since all these readings are ratios or sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from attoscope.measures.selection_rules import EVEN_ROWS, EVEN_SCALE
from attoscope.measures.smoothness_rules import BF16_SPACING
from attoscope.monitor.table import Row

WINDOW, ENOUGH = 20, 10
DEVIATIONS, FACTOR = 6.0, 2.0
LOGIT_LIMIT = 1e4
SURPRISE = 2.3


@dataclass(frozen=True, slots=True)
class Alarm:
    """A reading that says trouble: when, which rule, where, what, and against what."""

    step: int
    rule: str
    where: str
    value: float
    against: float
    sentence: str
    source: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class Limit:
    """A rule on one number: `fires(value, row, site, past)`."""

    name: str
    reading: str
    limit: float
    fires: Callable[[float, Row, str, Sequence[Row]], bool]
    sentence: str
    source: str


@dataclass(frozen=True, slots=True)
class Jump:
    """A reading that is watched for jumps; `sign` is +1 for upwards, -1 for downwards."""

    reading: str
    sign: int
    sentence: str
    source: str
    size: Callable[[float], float] = lambda value: value

    @property
    def name(self) -> str:
        """The rule's name."""
        return f"{self.reading}_{'jump' if self.sign > 0 else 'drop'}"


def _returned_to_even(value: float, row: Row, site: str, past: Sequence[Row]) -> bool:
    """Even now, in all rows and heads, and not always so: fresh models start even."""
    even = value < EVEN_SCALE and row.get(f"undecided/{site}", 0.0) >= EVEN_ROWS
    before = (old.get(f"largest_scale/{site}", 0.0) for old in past)
    return even and any(scale > 2 * EVEN_SCALE for scale in before)


LIMITS: tuple[Limit, ...] = (
    Limit(
        "not_finite", "non_finite", 0.0,
        lambda value, *_: value > 0,
        "scores or stream hold NaN or infinity",
        "attoscope's own check",
    ),
    Limit(
        "gradient_not_finite", "gradient_norm", math.inf,
        lambda value, *_: not math.isfinite(value),
        "gradients hold NaN or infinity",
        "attoscope's own check",
    ),
    Limit(
        "saturated_heads", "saturated_heads", 0.0,
        lambda value, *_: value > 0,
        "heads are saturated: attention sits on single keys and passes no gradient",
        "Zhai et al. 2023 (arXiv 2303.06296): entropy collapse; the limit is that of diagnose",
    ),
    Limit(
        "large_logits", "largest_score", LOGIT_LIMIT,
        lambda value, *_: value > LOGIT_LIMIT,
        "an attention logit is above 1e4",
        "Wortsman et al. 2023 (arXiv 2309.14322): runs past 1e4 diverge",
    ),
    Limit(
        "returned_to_even", "largest_scale", EVEN_SCALE,
        _returned_to_even,
        "attention makes no choice any more, in all heads, after it did",
        "Noci et al. 2022 (arXiv 2206.03126): even attention starves queries and keys of gradient",
    ),
    Limit(
        "rank_collapse", "rank_one_residual", BF16_SPACING,
        lambda value, *_: value < BF16_SPACING,
        "the tokens of a sequence lie on one line to within bfloat16",
        "Dong et al. 2021 (arXiv 2103.03404); the limit is that of diagnose",
    ),
    Limit(
        "adam_surprised", "adam_surprise", SURPRISE,
        lambda value, *_: value > SURPRISE,
        "gradients are more than 2.3 times what Adam's second moment expects",
        "Wortsman et al. 2023 (arXiv 2304.13013): comes before loss spikes",
    ),
)  # fmt: skip

JUMPS: tuple[Jump, ...] = (
    Jump("gradient_norm", +1, "the gradient is far larger than it was",
         "Molybog et al. 2023 (arXiv 2304.09871); Huang et al. 2025 (arXiv 2501.06842)"),
    Jump("norm", +1, "the stream is far longer than it was",
         "Liu et al. 2020 (arXiv 2004.08249): updates amplified through depth"),
    Jump("update_ratio", +1, "the layer adds far more than it did",
         "Liu et al. 2020 (arXiv 2004.08249)"),
    Jump("largest_score", +1, "attention logits are far larger than they were",
         "Dehghani et al. 2023 (arXiv 2302.05442); Wortsman et al. 2023 (arXiv 2309.14322)"),
    Jump("score_scale", +1, "attention logits spread far more than they did",
         "Zhai et al. 2023 (arXiv 2303.06296)"),
    Jump("margin", +1, "the chosen key leads by far more than it did",
         "Tarzanagh et al. 2023 (arXiv 2308.16898): the margin that training widens"),
    Jump("normalised_entropy", -1, "attention is far sharper than it was",
         "Zhai et al. 2023 (arXiv 2303.06296): entropy collapse"),
    Jump("cosine", -1, "tokens are far more alike than they were",
         "Dong et al. 2021 (arXiv 2103.03404)", size=lambda value: 1.0 - value),
    Jump("rank_one_residual", -1, "tokens are far nearer to one line than they were",
         "Dong et al. 2021 (arXiv 2103.03404)"),
)  # fmt: skip


def check(row: Row, past: Sequence[Row]) -> list[Alarm]:
    """The alarms of a new row, given the rows before it."""
    alarms = []
    for key, value in row.items():
        reading, _, site = key.partition("/")
        for limit in LIMITS:
            if limit.reading == reading and limit.fires(value, row, site, past):
                alarms.append(_alarm(limit, row, site, value, limit.limit))
        for jump in JUMPS:
            if jump.reading == reading and (before := left_its_past(jump, key, value, past)):
                alarms.append(_alarm(jump, row, site, value, before))
    return alarms


def left_its_past(jump: Jump, key: str, value: float, past: Sequence[Row]) -> float | None:
    """The median of the last looks when the reading jumped away from them, else None.

    Looks in which the reading is not finite or not positive say nothing about its range.
    """
    sizes = [jump.size(old.get(key, math.nan)) for old in past[-WINDOW:]]
    known = [math.log(s) for s in sizes if math.isfinite(s) and s > 0]
    size = jump.size(value)
    if len(known) < ENOUGH or not math.isfinite(size):
        return None
    middle = median(known)
    spread = 1.4826 * median(abs(k - middle) for k in known)
    now = math.log(size) if size > 0 else -math.inf
    if jump.sign * (now - middle) > max(DEVIATIONS * spread, math.log(FACTOR)):
        return math.exp(middle)
    return None


def _alarm(rule: Limit | Jump, row: Row, site: str, value: float, against: float) -> Alarm:
    where = f" in {site}" if site else ""
    sentence = f"{rule.sentence}{where} ({rule.reading} {value:.3g}, against {against:.3g})"
    step = int(row["step"])
    return Alarm(step, rule.name, site, value, against, sentence, rule.source)
