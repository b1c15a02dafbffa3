"""The smoothness family: closed forms, where its members disagree, invariances, bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attoscope.measures import Smoothness
from attoscope.measures.smoothness import random_cosine
from tests.measures.build import batch, layer, padded, read

FAMILY = (
    "cosine",
    "absolute_cosine",
    "frequency_ratio",
    "dirichlet_energy",
    "rank_one_residual",
    "effective_rank",
)


def readings(content, documents=(0,), first=None, **options):
    """Readings of content tokens; a first token is put in front, since it does not count."""
    first = 100 * torch.ones(content.shape[0], 1, content.shape[2]) if first is None else first
    measure = Smoothness()
    stream = torch.cat([first.to(content.dtype), content], 1)
    measure.update(layer(stream, **options), batch(*documents))
    return read(measure)


def family(content, **options):
    return {k: float(v.values[0]) for k, v in readings(content, **options).items()}


def close(got, expected):
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=1e-6), name


def test_identity():
    """n orthogonal unit rows: (I - J) I has norm sqrt(n - 1), J I has norm 1."""
    n = 4
    close(
        family(torch.eye(n)[None]),
        {
            "cosine": 0.0,
            "absolute_cosine": 0.0,
            "frequency_ratio": math.sqrt(n - 1),
            "dirichlet_energy": (n - 1) / n,
            "rank_one_residual": math.sqrt((n - 1) / n),
            "effective_rank": n,
            "effective_rank_share": 1.0,
        },
    )


def test_equal_rows():
    close(
        family(torch.tensor([[[3.0, -1.0, 2.0]] * 5])),
        {
            "cosine": 1.0,
            "absolute_cosine": 1.0,
            "frequency_ratio": 0.0,
            "dirichlet_energy": 0.0,
            "rank_one_residual": 0.0,
            "effective_rank": 1.0,
        },
    )


def test_rank_one_with_mixed_signs_parts_the_family():
    """Signs + + + -: the cosine sees half of it, the frequencies little, the rank all."""
    u = torch.tensor([0.6, 0.0, 0.8])
    signs = torch.tensor([1.0, 1.0, 1.0, -1.0])
    close(
        family((signs[:, None] * u)[None]),
        {
            # Of 6 pairs 3 agree and 3 do not.
            "cosine": 0.0,
            "absolute_cosine": 1.0,
            # |JX|^2 = 4 (1/2)^2 = 1, |X|^2 = 4.
            "frequency_ratio": math.sqrt(3.0),
            "dirichlet_energy": 0.75,
            "rank_one_residual": 0.0,
            "effective_rank": 1.0,
        },
    )


def test_two_rows_at_sixty_degrees():
    x = torch.tensor([[[1.0, 0.0], [0.5, math.sqrt(0.75)]]])
    # Singular values squared 1 ± cos 60°.
    s = np.sqrt([1.5, 0.5])
    p = s / s.sum()
    close(
        family(x),
        {
            "cosine": 0.5,
            "absolute_cosine": 0.5,
            "frequency_ratio": math.sqrt(0.25 / 0.75),
            "dirichlet_energy": 0.25,
            "rank_one_residual": 0.5,
            "effective_rank": math.exp(-(p * np.log(p)).sum()),
        },
    )


@pytest.mark.parametrize(("tokens", "width"), [(20, 8), (8, 20)])
def test_against_the_definitions(tokens, width):
    """Both Gram matrices, against brute force with a singular value decomposition."""
    torch.manual_seed(0)
    x = torch.randn(1, tokens, width) + 0.5
    a = x[0].double().numpy()
    u = a / np.linalg.norm(a, axis=1, keepdims=True)
    off = ~np.eye(tokens, dtype=bool)
    s = np.linalg.svd(a, compute_uv=False)
    p = s / s.sum()
    mean = a.mean(0, keepdims=True)
    high = np.linalg.norm(a - mean)
    close(
        family(x),
        {
            "cosine": (u @ u.T)[off].mean(),
            "absolute_cosine": np.abs(u @ u.T)[off].mean(),
            "frequency_ratio": high / (np.linalg.norm(mean) * math.sqrt(tokens)),
            "dirichlet_energy": high**2 / np.linalg.norm(a) ** 2,
            "rank_one_residual": math.sqrt(1 - s[0] ** 2 / (s**2).sum()),
            "effective_rank": math.exp(-(p * np.log(p)).sum()),
            "effective_rank_share": math.exp(-(p * np.log(p)).sum()) / min(tokens, width),
        },
    )


def test_scale_and_rotation_change_nothing():
    torch.manual_seed(0)
    x = torch.randn(1, 12, 6)
    turn = torch.linalg.qr(torch.randn(6, 6)).Q
    expected = family(x)
    close({k: family(1e-4 * x)[k] for k in FAMILY}, {k: expected[k] for k in FAMILY})
    close({k: family(x @ turn)[k] for k in FAMILY}, {k: expected[k] for k in FAMILY})
    order = torch.randperm(12)
    close({k: family(x[:, order])[k] for k in FAMILY}, {k: expected[k] for k in FAMILY})


def test_random_directions_meet_the_null():
    torch.manual_seed(0)
    got = readings(torch.randn(1, 128, 300))["absolute_cosine"]
    assert got.values[0] == pytest.approx(got.null[0], rel=0.02)
    assert random_cosine(2) == pytest.approx(2 / math.pi)
    assert random_cosine(300) == pytest.approx(math.sqrt(2 / (math.pi * 300)), rel=0.01)


def test_first_and_special_tokens_are_left_out():
    torch.manual_seed(0)
    x = torch.randn(1, 10, 5)
    special = torch.zeros(1, 12, dtype=torch.bool)
    special[:, 11] = True
    spiked = torch.cat([x, 1e4 * torch.ones(1, 1, 5)], 1)
    got = family(spiked, special=special)
    close({k: got[k] for k in FAMILY}, {k: family(x)[k] for k in FAMILY})
    assert got["frequency_ratio_all"] != pytest.approx(got["frequency_ratio"], rel=0.1)


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 4), (2, 2)])
@pytest.mark.parametrize("garbage", [7.0, math.nan])
def test_padding_changes_nothing(left, right, garbage):
    torch.manual_seed(0)
    x = torch.randn(1, 11, 6)
    alone, inside = Smoothness(), Smoothness()
    alone.update(layer(x), batch(0))
    wide = padded(x, left, right, garbage)
    valid = padded(torch.ones(1, 11, dtype=torch.bool), left, right, False)
    inside.update(layer(wide, valid=valid), batch(0))
    for name, reading in read(alone).items():
        np.testing.assert_allclose(read(inside)[name].values, reading.values, atol=1e-9)


def _documents():
    torch.manual_seed(0)
    return [layer(torch.randn(1, 6 + d, 8), before=torch.randn(1, 6 + d, 8)) for d in range(5)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
def test_merging_equals_a_single_pass_to_the_last_digit(order):
    both, parts = Smoothness(), [Smoothness(), Smoothness()]
    for d, one in enumerate(_documents()):
        both.update(one, batch(d))
    for d in order:
        parts[d % 2].update(_documents()[d], batch(d))
    parts[0].merge(parts[1])
    for x, y in zip(parts[0].read(), both.read(), strict=True):
        for field in ("values", "low", "high"):
            np.testing.assert_array_equal(getattr(x, field), getattr(y, field))


def test_points_are_named_along_the_stream():
    measure = Smoothness()
    x = torch.randn(1, 4, 3)
    measure.update(layer(x, before=x, index=0), batch(0))
    measure.update(layer(x, before=x, index=1), batch(0))
    measure.update(layer(x, before=x, index=2, final=True), batch(0))
    points = read(measure)["cosine"].coords["point"]
    assert points == ("encoder.in", "encoder.0", "encoder.1", "encoder.final")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    torch.manual_seed(0)
    x = torch.randn(1, 20, 16)
    exact, half = family(x), family(x.to(dtype))
    for name in FAMILY:
        assert half[name] == pytest.approx(exact[name], rel=0.02, abs=0.01), name


def test_one_content_token_has_no_smoothness():
    reading = readings(torch.randn(1, 1, 4))["cosine"]
    assert np.isnan(reading.values).all()
    assert "1 of 1 documents not counted: fewer than two content tokens" in reading.reason


def test_values_that_are_not_finite_are_shut_in():
    torch.manual_seed(0)
    good, bad = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    bad[1, 3, 2] = math.inf
    measure = Smoothness()
    measure.update(layer(good, index=0), batch(0, 1))
    measure.update(layer(bad, index=1), batch(0, 1))
    for reading in measure.read():
        assert np.isfinite(reading.values).tolist() == [True, False], reading.name
        assert "not computed at encoder.1: values there are not finite" in reading.reason


def test_zero_tokens_do_not_crash():
    got = family(torch.zeros(1, 5, 4))
    assert math.isnan(got["cosine"]) and math.isnan(got["effective_rank"])
