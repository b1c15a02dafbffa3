"""Rules on smoothness: what each fires on, what it leaves alone, and exact numbers in the words."""

from __future__ import annotations

import ast
import importlib
import math

import pytest
import torch

from attoscope.closeups.places import PLACES, numbers
from attoscope.measures import Smoothness, Stream, findings_of
from attoscope.measures.points import points
from attoscope.measures.smoothness_rules import ALIKE, RULES
from attoscope.remedies.functional import neutreno_attention, stability_limit
from tests.measures.build import batch, layer
from tests.measures.healthy import LAYERS, TOKENS, WIDTH, Model, only, sites

IDS = {rule.id for rule in RULES}
# Content tokens: the first one is left out.
N = TOKENS - 1


@pytest.fixture
def model():
    return Model()


def smooth(model):
    """Findings on smoothness, and an exploding stream, which may be taken for one."""
    return [f for f in model.findings() if f.id in IDS | {"exploding_stream"}]


def tokens(shared, apart):
    """Each token is `shared` times a common unit vector plus `apart` times one of its own.

    All these vectors are orthogonal: the cosine of any two tokens is s^2 / (s^2 + a^2).
    """
    torch.manual_seed(2)
    axes = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64)).Q
    x = shared * axes[0] + apart * axes[1 : TOKENS + 1]
    return x.expand(2, TOKENS, WIDTH).float()


def of_cosine(cosine):
    return tokens(math.sqrt(cosine), math.sqrt(1 - cosine))


def rank_share(cosine):
    """Effective rank over N of N tokens of which any two have this cosine."""
    values = [math.sqrt(1 + (N - 1) * cosine), *[math.sqrt(1 - cosine)] * (N - 1)]
    shares = [v / sum(values) for v in values]
    return math.exp(-sum(p * math.log(p) for p in shares)) / N


def with_depth(model, *streams):
    model.stream = list(streams)
    return model


# Over-smoothing


RISING = (0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.98)


def test_tokens_that_become_nearly_parallel(model):
    found = only(smooth(with_depth(model, *map(of_cosine, RISING))))
    assert (found.id, found.severity, found.sites) == (
        "over_smoothing",
        "warning",
        sites(3, 4, 5),
    )
    assert found.measured == pytest.approx(0.98, abs=1e-6)
    assert found.sentence == (
        "After layers 3–5, content tokens are nearly parallel, with a mean cosine of up to "
        "0.98; it was 0.1 at the input of the first layer and still 0.7 after layer 2. The "
        f"directions that tokens use fell from {100 * rank_share(0.1):.0f} % of the possible to "
        f"{100 * rank_share(0.98):.0f} %."
    )
    assert "look at the loss" in found.remedy.text


@pytest.mark.parametrize(
    ("why", "cosines"),
    [
        ("steadily rising, and far from parallel", (0.1, 0.2, 0.35, 0.5, 0.65, 0.75, 0.84)),
        ("a passing bump", (0.1, 0.5, 0.9, 0.98, 0.98, 0.9, 0.8)),
        ("only after the last block", (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.98)),
        ("alike from the start", (0.97, 0.971, 0.972, 0.973, 0.974, 0.975, 0.98)),
        ("less than half the rank is lost", (0.1, 0.3, 0.5, 0.7, 0.88, 0.89, 0.9)),
    ],
)
def test_no_over_smoothing(model, why, cosines):
    assert smooth(with_depth(model, *map(of_cosine, cosines))) == [], why


def test_tokens_alike_from_the_input_on_are_not_smoothed_by_depth(model):
    """What tells them apart falls onto three directions, but 1 - cosine does not fall by half."""
    torch.manual_seed(2)
    axes = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
    few = math.sqrt(0.9) * axes[0] + math.sqrt(0.1) * axes[1 + torch.arange(TOKENS) % 3]
    streams = [of_cosine(0.9), *[few.expand(2, TOKENS, WIDTH)] * LAYERS]
    assert smooth(with_depth(model, *streams)) == []


def test_a_common_mean_up_to_the_limit_leaves_most_of_the_rank():
    """So differences that keep all their directions are not called lost at Gong's 0.9."""
    assert rank_share(ALIKE) > 0.5 * rank_share(0.0)
    assert rank_share(0.9) > 0.5 * rank_share(0.0)


def test_a_mean_that_grows_block_by_block_is_over_smoothing(model):
    """Differences keep their size, as skip connections make them; the mean outgrows them."""
    streams = [tokens(0.4 * 1.6**i, 1.0) for i in range(LAYERS + 1)]
    streams[5:] = [tokens(shared, 1.0) for shared in (5.0, 9.0)]
    assert only(smooth(with_depth(model, *streams))).id == "over_smoothing"


def test_a_massive_mean_that_appears_at_once_is_not(model):
    streams = [tokens(0.4, 1.0 + 0.01 * i) for i in range(3)]
    streams += [tokens(9.0, 1.0 + 0.01 * i) for i in range(4)]
    assert smooth(with_depth(model, *streams)) == []


def test_differences_that_one_block_wipes_out_are_over_smoothing(model):
    streams = [tokens(1.0, 1.0 + 0.01 * i) for i in range(3)]
    streams += [tokens(1.0, 0.12 + 0.01 * i) for i in range(4)]
    assert only(smooth(with_depth(model, *streams))).sites == sites(2, 3, 4, 5)


def test_the_outlier_channel_alone_is_no_over_smoothing(model):
    streams = []
    for i in range(LAYERS + 1):
        x = model.stream[i].clone()
        x[..., 7] = 2.0**i  # in the end, a cosine of 0.99 by this channel alone
        streams.append(x)
    found = with_depth(model, *streams).findings()
    assert "over_smoothing" not in {f.id for f in found}
    assert "massive_channel" in {f.id for f in found}


def test_over_smoothing_is_seen_beside_an_outlier_channel(model):
    streams = []
    for cosine in (*RISING[:4], 0.93, 0.98, 0.99):
        x = of_cosine(cosine)
        x[..., 7] = 1.2  # more than half of the energy
        streams.append(x)
    found = with_depth(model, *streams).findings()
    assert {"over_smoothing", "outlier_channel"} <= {f.id for f in found}


def test_what_collapses_at_the_end_is_called_that_alone(model):
    streams = [*map(of_cosine, RISING[:6]), of_cosine(1 - 1e-7)]
    found = only(smooth(with_depth(model, *streams)))
    assert (found.id, found.sites) == ("rank_collapse", sites(5))


def final(model, stream):
    """Findings on smoothness with a last norm behind the model."""
    measures = [Smoothness(), Stream()]
    for measure in measures:
        for i in range(LAYERS):
            before, after = model.stream[i], model.stream[i + 1]
            measure.update(layer(after, before=before, index=i), batch(0, 1))
        measure.update(layer(stream, index=LAYERS, final=True), batch(0, 1))
    return [
        f for f in findings_of(measures, [r for m in measures for r in m.read()]) if f.id in IDS
    ]


def test_it_has_to_hold_behind_the_last_norm(model):
    with_depth(model, *map(of_cosine, RISING))
    assert final(model, of_cosine(0.5)) == []
    assert only(final(model, of_cosine(0.95))).sites == (*sites(3, 4, 5), "encoder.final")


# Differences that explode


def test_differences_that_double_beside_the_mean(model):
    streams = [tokens(1.0, 0.3 * 2.5**i) for i in range(LAYERS + 1)]
    found = only(smooth(with_depth(model, *streams)))
    assert (found.id, found.severity, found.sites) == (
        "sharpening_blow_up",
        "warning",
        sites(1, 2, 3, 4, 5),
    )
    sizes = [(0.3 * 2.5**i) ** 2 for i in (1, LAYERS)]
    apart = [math.sqrt(size * (N - 1) / N) for size in sizes]
    mean = [math.sqrt(1.0 + size / N) for size in sizes]
    assert found.measured == pytest.approx(apart[1] / mean[1], rel=1e-5)
    assert found.sentence == (
        "Over layers 1–5, the differences between tokens explode: they grew "
        f"{apart[1] / apart[0]:.3g} times while the mean grew {mean[1] / mean[0]:.3g} times, and "
        f"went from {apart[0] / mean[0]:.3g} to {apart[1] / mean[1]:.3g} times its length."
    )


@pytest.mark.parametrize(
    ("why", "streams"),
    [
        ("two blocks only", [(1, 0.1), (1, 0.1), (1, 0.3), (1, 0.9), (1, 1), (1, 1), (1, 1)]),
        ("the mean fades", [(2.5**-i, 0.05) for i in range(7)]),
        ("slower than doubling", [(1, 0.1 * 1.9**i) for i in range(7)]),
    ],
)
def test_no_blow_up(model, why, streams):
    model = with_depth(model, *(tokens(*sizes) for sizes in streams))
    assert "sharpening_blow_up" not in {f.id for f in smooth(model)}, why


def test_differences_that_a_norm_holds_in_size(model):
    """They cannot double, but double beside the mean. They come in pairs of opposite sign."""
    axes = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64)).Q
    own = torch.stack([axes[1 + t // 2] * (-1) ** t for t in range(TOKENS - 2)])
    own = torch.cat([axes[20:21], own, torch.zeros(1, WIDTH)])
    streams = []
    for angle in (math.atan(0.4 * 2.5**i) for i in range(LAYERS + 1)):
        x = math.cos(angle) * axes[0] + math.sin(angle) * own
        streams.append(x.expand(2, TOKENS, WIDTH).float())
    found = only(smooth(with_depth(model, *streams)))
    assert (found.id, found.sites[:3]) == ("sharpening_blow_up", sites(1, 2, 3))


@pytest.mark.parametrize(("strength", "ids"), [(3.0, {"sharpening_blow_up"}), (0.6, set())])
def test_neutreno_above_its_limit_without_norms(model, strength, ids):
    """A = I/4 + 3/4 J: the limit is 1 + 1/4; what differs grows by 1/4 - strength a layer."""
    own = torch.eye(TOKENS, dtype=torch.float64)
    attention = own / 4 + 0.75 / TOKENS
    assert stability_limit(attention).item() == pytest.approx(1.25)
    first = tokens(1.0, 0.5).double()
    model.stream = [first]
    for _ in range(LAYERS):
        model.stream.append(neutreno_attention(attention, model.stream[-1], first, strength))
    model.stream = [x.float() for x in model.stream]
    assert {f.id for f in smooth(model)} == ids


def test_a_stream_that_explodes_as_a_whole_is_another_finding(model):
    streams = [tokens(2.5**i, 0.5 * 2.5**i) for i in range(LAYERS + 1)]
    assert only(smooth(with_depth(model, *streams))).id == "exploding_stream"


# Collapse


def line(model, lengths):
    """From layer 3 on, every token is a multiple of one vector."""
    torch.manual_seed(1)
    for i in range(4, LAYERS + 1):
        model.stream[i] = lengths[:, None] * torch.randn(2, 1, WIDTH)
    return model


def signs(negative):
    """Unit lengths, of which so many are negative."""
    lengths = torch.ones(TOKENS)
    lengths[1 : 1 + negative] = -1.0
    return lengths


@pytest.mark.parametrize(
    ("negative", "cosine"),
    [(11, (1 / N - 1) / (N - 1)), (3, (17**2 / N - 1) / (N - 1))],
)
def test_a_line_with_both_signs(model, negative, cosine):
    """With P tokens on one side and M on the other, c = ((P-M)^2/n - 1) / (n-1), |c| = 1."""
    found = only(smooth(line(model, signs(negative) * (1 + torch.rand(TOKENS)))))
    assert (found.id, found.severity, found.sites) == (
        "sign_collapse",
        "severe",
        sites(3, 4, 5),
    )
    assert f"(mean |cosine| 1, mean cosine {cosine:.3g})" in found.sentence
    assert "absolute=True" in found.remedy.code


@pytest.mark.parametrize("negative", [0, 23])
def test_a_line_with_one_sign_is_rank_collapse(model, negative):
    found = only(smooth(line(model, signs(negative) * (1 + torch.rand(TOKENS)))))
    assert (found.id, found.severity, found.sites) == (
        "rank_collapse",
        "severe",
        sites(3, 4, 5),
    )
    assert "they differ in length only (mean cosine 1)" in found.sentence


def test_equal_tokens_are_said_to_be_equal(model):
    found = only(smooth(line(model, signs(0))))
    assert "they are all but equal (mean cosine 1)" in found.sentence


def test_one_long_token_is_no_collapse(model):
    """It holds all the energy, so that rank one fits; the others lie elsewhere."""
    for i in range(4, LAYERS + 1):
        model.stream[i] = model.stream[i].clone()
        model.stream[i][:, 5] *= 1e4
    assert not smooth(model) or {f.id for f in smooth(model)} == {"exploding_stream"}


# What is shown of a token


@pytest.mark.parametrize(("reading", "value"), [("cosine", 0.8), ("frequency_ratio", None)])
def test_the_number_of_a_token(reading, value):
    """All content tokens are alike here: the mean cosine of each is that of any two."""
    shared, apart = 2.0, 1.0
    one = layer(tokens(shared, apart))
    (point,) = points(one, torch.float32)
    found = numbers(reading, one, point)
    if value is None:
        value = math.sqrt(apart**2 * (1 - 1 / N)) / math.sqrt(shared**2 + apart**2 / N)
    assert found[:, 0].isnan().all()
    assert torch.allclose(found[:, 1:], torch.tensor(value), atol=1e-5)


def test_every_finding_on_the_stream_has_such_a_number():
    assert {rule.reading for rule in (*Smoothness.rules, *Stream.rules)} <= PLACES.keys()


# What the remedies say


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_what_the_code_imports_is_there(rule):
    """Every name imported from attoscope, and every attribute of it, exists."""
    for node in ast.walk(ast.parse(rule.code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("attoscope"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "attoscope"
        ):
            assert hasattr(importlib.import_module("attoscope"), node.attr)
