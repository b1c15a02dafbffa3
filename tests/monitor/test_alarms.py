"""Alarms: limits, and jumps out of a run's own past."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attoscope.monitor.alarms import ENOUGH, JUMPS, LIMITS, Jump, check, left_its_past


def rows(values: list[float], key: str = "norm/decoder.0") -> list[dict[str, float]]:
    return [{"step": float(i), key: value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("key", "fine", "bad", "rule"),
    [
        ("non_finite/decoder.0", 0.0, 1.0, "not_finite"),
        ("gradient_norm", 1.0, math.nan, "gradient_not_finite"),
        ("saturated_heads/decoder.0", 0.0, 0.25, "saturated_heads"),
        ("largest_score/decoder.0", 9e3, 1.1e4, "large_logits"),
        ("rank_one_residual/decoder.0", 0.01, 0.005, "rank_collapse"),
        ("adam_surprise/decoder.0", 2.2, 2.4, "adam_surprised"),
    ],
)
def test_limits(key: str, fine: float, bad: float, rule: str) -> None:
    assert check({"step": 3.0, key: fine}, []) == []
    (alarm,) = check({"step": 3.0, key: bad}, [])
    assert (alarm.rule, alarm.step) == (rule, 3)
    assert alarm.where == key.partition("/")[2] and alarm.source and "step 3" in str(alarm)


def test_even_attention_is_an_alarm_only_after_a_choice() -> None:
    even = {"step": 9.0, "largest_scale/decoder.0": 0.01, "undecided/decoder.0": 1.0}
    chose = {"step": 5.0, "largest_scale/decoder.0": 1.0, "undecided/decoder.0": 0.5}
    assert check(even, [even]) == []
    assert [a.rule for a in check(even, [chose])] == ["returned_to_even"]


def test_a_jump_needs_a_past_and_both_sizes() -> None:
    rule = next(j for j in JUMPS if j.reading == "norm")
    calm = [1.0, 1.1] * ENOUGH
    assert left_its_past(rule, "norm/decoder.0", 1.9, rows(calm)) is None
    assert left_its_past(rule, "norm/decoder.0", 2.5, rows(calm)) == pytest.approx(
        1.05, abs=0.01
    )
    assert left_its_past(rule, "norm/decoder.0", 0.1, rows(calm)) is None
    assert left_its_past(rule, "norm/decoder.0", 2.5, rows(calm[: ENOUGH - 1])) is None
    wild = [0.5, 2.0] * ENOUGH
    assert left_its_past(rule, "norm/decoder.0", 4.0, rows(wild)) is None


def test_drops_and_sizes() -> None:
    drop = Jump("cosine", -1, "", "", size=lambda value: 1.0 - value)
    past = rows([0.2, 0.21] * ENOUGH, "cosine/decoder.0")
    assert left_its_past(drop, "cosine/decoder.0", 0.9, past) is not None
    assert left_its_past(drop, "cosine/decoder.0", 1.0, past) is not None
    assert left_its_past(drop, "cosine/decoder.0", -0.5, past) is None
    assert left_its_past(drop, "cosine/decoder.0", math.nan, past) is None


def test_noise_and_slow_growth_raise_no_jump() -> None:
    """The control: lognormal noise on a reading that doubles every 20 looks, 50 series."""
    rng = np.random.default_rng(0)
    fired = 0
    for _ in range(50):
        values = np.exp(np.arange(100) * math.log(2) / 20 + rng.normal(0, 0.2, 100)).tolist()
        past = rows(values)
        fired += sum(len(check(past[i], past[:i])) for i in range(100))
    assert fired <= 1


def test_every_rule_says_why() -> None:
    names = [rule.name for rule in (*LIMITS, *JUMPS)]
    assert len(set(names)) == len(names)
    assert all(rule.source and rule.sentence for rule in (*LIMITS, *JUMPS))
