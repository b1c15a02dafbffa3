"""The residual stream: known values, what sticks out, and values that are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attoscope.measures import Stream
from tests.measures.build import batch, layer, padded, read


def measured(stream, before=None, documents=(0,), **options):
    measure = Stream()
    measure.update(layer(stream, before=before, **options), batch(*documents))
    return measure


def value(measure, name, point=-1):
    return float(read(measure)[name].values[point])


def test_norm_and_variance_of_known_vectors():
    """Content tokens (3, 4) and (6, 8): norms 5 and 10, variances 0.25 and 1."""
    x = torch.tensor([[[100.0, 0.0], [3.0, 4.0], [6.0, 8.0]]])
    measure = measured(x)
    assert value(measure, "norm") == 7.5
    assert value(measure, "variance") == pytest.approx(0.625)


def test_growth_and_update_of_a_block():
    before = torch.tensor([[[1.0, 0.0], [3.0, 4.0], [3.0, 4.0]]])
    after = torch.tensor([[[9.0, 9.0], [6.0, 8.0], [3.0, 4.0]]])
    measure = measured(after, before)
    # Norms 5, 5 become 10, 5; the change is 5 and 0.
    assert value(measure, "growth") == 1.5
    assert value(measure, "update_ratio") == 0.5
    assert read(measure)["growth"].coords == {"layer": ("encoder.0",)}


def test_massive_activation_over_the_median():
    x = torch.ones(1, 4, 8)
    x[0, 0, 3] = -600.0
    measure = measured(x)
    assert value(measure, "massive_activation") == 600.0
    spot = measure.witnesses["largest", "encoder.0", -1]
    assert (spot.value, spot.position, spot.channel, spot.first) == (-600.0, 0, 3, True)


def test_longest_token_over_the_median_one():
    x = torch.eye(5, 6)[None] * torch.tensor([40.0, 2.0, 2.0, 2.0, 2.0])[None, :, None]
    assert value(measured(x), "token_norm_ratio") == 20.0


def test_channel_share_weighs_tokens_alike():
    """One token has 9/10 in channel 1, the other 1/2, whatever their lengths."""
    x = torch.tensor([[[5.0, 5.0], [1.0, 3.0], [100.0, 100.0]]])
    measure = measured(x)
    assert value(measure, "channel_share") == pytest.approx(0.7)
    assert read(measure)["channel_share"].null[0] == 0.5
    assert measure.witnesses["channel", "encoder.0", -1].channel == 1


def test_points_and_layers_along_the_stack():
    measure = Stream()
    x = torch.randn(1, 4, 3)
    measure.update(layer(x, before=x, index=0), batch(0))
    measure.update(layer(x, before=x, index=1), batch(0))
    measure.update(layer(x, before=x, index=2, final=True), batch(0))
    got = read(measure)
    assert got["norm"].coords["point"] == (
        "encoder.in",
        "encoder.0",
        "encoder.1",
        "encoder.final",
    )
    # The final norm is no block.
    assert got["growth"].coords["layer"] == ("encoder.0", "encoder.1")
    np.testing.assert_array_equal(got["update_ratio"].values, 0.0)


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 4), (2, 2)])
@pytest.mark.parametrize("garbage", [1e6, math.nan])
def test_padding_changes_nothing(left, right, garbage):
    torch.manual_seed(0)
    x, y = torch.randn(1, 50, 6), torch.randn(1, 50, 6)
    valid = padded(torch.ones(1, 50, dtype=torch.bool), left, right, False)
    wide = [padded(z, left, right, garbage) for z in (x, y)]
    alone, inside = measured(x, y), measured(*wide, valid=valid)
    for name, reading in read(alone).items():
        np.testing.assert_allclose(read(inside)[name].values, reading.values, rtol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_merging_equals_a_single_pass_to_the_last_digit(order):
    torch.manual_seed(0)
    streams = torch.randn(4, 2, 1, 9, 5)
    both, parts = Stream(), [Stream(), Stream()]
    for d in range(4):
        both.update(layer(streams[d, 0], before=streams[d, 1]), batch(d))
    for d in order:
        parts[d % 2].update(layer(streams[d, 0], before=streams[d, 1]), batch(d))
    parts[0].merge(parts[1])
    for x, y in zip(parts[0].read(), both.read(), strict=True):
        for field in ("values", "low", "high"):
            np.testing.assert_array_equal(getattr(x, field), getattr(y, field))
    assert parts[0].witnesses == both.witnesses


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    torch.manual_seed(0)
    x, y = torch.randn(1, 30, 16), torch.randn(1, 30, 16)
    exact, other = measured(x, y), measured(x.to(dtype), y.to(dtype))
    for name, reading in read(exact).items():
        np.testing.assert_allclose(
            read(other)[name].values, reading.values, rtol=0.02, err_msg=name
        )


def test_half_precision_does_not_overflow_on_the_way():
    """300^2 is beyond float16, the norm is not."""
    x = torch.full((1, 3, 4), 300.0, dtype=torch.float16)
    assert value(measured(x), "norm") == pytest.approx(600.0)


def test_values_that_are_not_finite_are_said_and_shut_in():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4)
    bad = x.clone()
    bad[1, 2, :2] = math.nan
    measure = Stream()
    measure.update(layer(x, before=x, index=0), batch(0, 1))
    measure.update(layer(bad, before=x, index=1), batch(0, 1))
    got = read(measure)
    assert got["non_finite"].values.tolist() == pytest.approx([0, 0, 2 / 20 / 2])
    for name in ("norm", "massive_activation", "channel_share"):
        assert np.isfinite(got[name].values).tolist() == [True, True, False]
        assert "not finite" in got[name].reason
    assert np.isfinite(got["growth"].values).tolist() == [True, False]
    spot = measure.witnesses["non_finite", "encoder.1", -1]
    assert (spot.document, spot.position) == (1, 2)


def test_one_token():
    got = read(measured(torch.ones(1, 1, 4), torch.ones(1, 1, 4)))
    assert got["token_norm_ratio"].values[-1] == 1.0
    assert np.isnan(got["norm"].values).all()
    assert "no content token" in got["norm"].reason
    assert np.isnan(got["growth"].values).all()


def test_a_stream_that_was_not_seen():
    measure = Stream()
    x = torch.randn(1, 4, 3)
    measure.update(layer(x, before=None), batch(0))
    assert read(measure)["norm"].coords["point"] == ("encoder.0",)
    assert read(measure)["growth"].values.size == 0
