"""Signal propagation: known values of the paper, and predictions beside freshly built models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from attoscope import diagnose
from attoscope.errors import AttoscopeError
from attoscope.moments.curves import curve_moments
from attoscope.prediction import predict
from attoscope.prediction.branch_weights import BranchWeights, WeightReader, Weights
from attoscope.prediction.building import build, synthetic_batch
from attoscope.prediction.chain import (
    Pair,
    _attention_back,
    _mlp_back,
    forecast,
    output,
    pair_of,
    settled_correlation,
    step,
)
from attoscope.prediction.initialisers import fits, initialised
from attoscope.prediction.signal import StackSignal, signal_of
from attoscope.prediction.signal_readings import signal_readings
from attoscope.trace import Batch, Subject
from attoscope.trace.branch_types import Passing, Sublayer
from attoscope.trace.sublayers import sublayers, watch_sublayers
from tests.models import make

SEEDS = (0, 1, 2)
RANGE = 0.0625  # 1 / sqrt(width): variances 1/d as in the paper's Xavier


@lru_cache(maxsize=1)
def kinds() -> dict[str, Sublayer]:
    subject, batch = make("nano")
    attention, mlp = sublayers(subject, batch)[:2]
    return {"attention": attention, "mlp": mlp}


def branch(kind: str, **squares: tuple[float, int, int]) -> BranchWeights:
    roles = {role: Weights(*((s, 3.0, i, o))) for role, (s, i, o) in squares.items()}
    return BranchWeights(kinds()[kind], roles)  # type: ignore[arg-type]


def attention(d: int = 256, query: float = 1.0, value: float = 1.0) -> BranchWeights:
    """Variances `query / d` of W_Q and W_K, `value / d` of W_V, and 1 / d of W_O."""
    given = (query / d, d, d)
    return branch(
        "attention", query=given, key=given, value=(value / d, d, d), output=(1 / d, d, d)
    )


def mlp(name: str = "relu", d: int = 64, gated: bool = False) -> BranchWeights:
    squares = {"in": (1 / d, d, 4 * d), "out": (1 / (4 * d), 4 * d, d)}
    if gated:
        squares["gate"] = (1 / d, d, 4 * d)
    made = branch("mlp", **squares)
    return replace(made, sublayer=replace(made.sublayer, activation=name, gated=gated))


def test_attention_has_the_variance_and_covariance_of_the_paper() -> None:
    out = pair_of(output(attention(), Pair(1.0, 0.5).matrix(512), causal=False))
    assert out.variance == pytest.approx(0.5025973133, abs=1e-9)
    assert out.variance * out.correlation == pytest.approx(0.5009803772, abs=1e-9)


def test_gradients_of_attention() -> None:
    """The covariance is the paper's; the variance has the correction for keys near the query."""
    x, top, length = Pair(1.0, 0.5).matrix(512), Pair(1.0, 0.2).matrix(512), 512
    back = pair_of(_attention_back(attention(), x, top, causal=False))
    plain = (1 + (length - 1) * 0.2) / length
    assert back.variance * back.correlation == pytest.approx(plain, rel=1e-9)
    a = 0.25
    lifted = (1 + (length - 1) * 0.2 * math.exp(a) * (1 + a)) / length
    assert back.variance == pytest.approx(lifted, rel=1e-3)
    even = pair_of(_attention_back(attention(query=1e-6), x, top, causal=False))
    assert 0.25 * even.variance == pytest.approx(0.0503906250, abs=1e-9)


def test_causal_attention_spread_evenly() -> None:
    out = pair_of(output(attention(query=1e-9), Pair(1.0, 0.3).matrix(64), causal=True))
    assert out.variance == pytest.approx(0.351886, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "r", "square", "product", "slope", "slope_pair"),
    [
        ("relu", 0.5, 0.5, 0.5 * 0.6089977810, 0.5, 0.5 * 0.6666666667),
        ("gelu", 0.5, 0.4252214826, 0.1477174435 + 0.2820947918**2, 0.4558508656, 0.3422672425),
        ("gelu", 0.9, 0.4252214826, 0.3013913990 + 0.2820947918**2, 0.4558508656, 0.4296273622),
    ],
)
def test_activations(
    name: str, r: float, square: float, product: float, slope: float, slope_pair: float
) -> None:
    found = curve_moments(name, 1.0, np.array([r]))
    assert found.square == pytest.approx(square, abs=1e-7)
    assert found.slope_square == pytest.approx(slope, abs=1e-7)
    # Between the knots of the spline.
    assert found.product[0] == pytest.approx(product, abs=2e-5)
    assert found.slope_product[0] == pytest.approx(slope_pair, abs=2e-5)


def test_mlps_forward_and_backward() -> None:
    x = Pair(1.0, 0.5).matrix(16)
    out = pair_of(output(mlp(), x, causal=False))
    assert (out.variance, out.correlation) == pytest.approx((0.5, 0.6089977810))
    back = pair_of(_mlp_back(mlp(), x, Pair(1.0, 0.3).matrix(16)))
    # d h s1 s2' / 2 both ways, here with h s2' = 1 and d s1 = 1.
    assert (back.variance, back.correlation) == pytest.approx((0.5, 0.3 * 0.6666666667))
    for r, wanted in ((0.5, 0.257423), (0.9, 0.805802)):
        gated = pair_of(output(mlp("silu", gated=True), Pair(1.0, r).matrix(16), False))
        assert gated.variance == pytest.approx(0.3557755198, abs=1e-6)
        assert gated.correlation == pytest.approx(wanted, abs=1e-4)


def test_prenorm_grows_by_its_branches_and_gradients_by_their_share() -> None:
    """`s_n = 1 + n C` and `g_n / g_N = prod (1 + C / s)`, exactly, for MLPs alone."""
    branches = [mlp() for _ in range(10)]
    curves = forecast(branches, Pair(1.0, 0.5), Pair(1.0, 0.0), length=8, causal=False)
    assert [c.after.variance for c in curves] == pytest.approx(
        [1 + 0.5 * n for n in range(1, 11)]
    )
    wanted = np.prod([1 + 0.5 / (1 + 0.5 * n) for n in range(10)])
    assert curves[0].gradient.variance == pytest.approx(wanted)


def test_where_correlation_settles() -> None:
    assert settled_correlation(
        [attention(query=1e-9)], length=32, causal=False
    ) == pytest.approx(1)
    assert (
        settled_correlation([mlp()], length=32, causal=False) > 0.95
    )  # 1 in the limit, slowly


def test_deepscalelm_keeps_variance_one() -> None:
    branches = [each for _ in range(12) for each in (attention(), mlp())]
    layered = [
        replace(b, sublayer=replace(b.sublayer, site=replace(b.sublayer.site, layer=i // 2)))
        for i, b in enumerate(branches)
    ]
    made = initialised("deepscalelm", layered, 0.2, length=32, causal=False)
    assert made[0].scale ** 2 == pytest.approx(2 / 12) and made[0].skip ** 2 == pytest.approx(
        10 / 12
    )
    curves = forecast(made, Pair(1.0, 0.2), Pair(1.0, 0.0), length=32, causal=False)
    assert [c.after.variance for c in curves] == pytest.approx([1.0] * 24, abs=1e-6)
    with pytest.raises(AttoscopeError, match="expected at least 3"):
        initialised("deepscalelm", layered[:4], 0.2, length=32, causal=False)
    assert not fits("admin", layered) and fits("xavier", layered)
    with pytest.raises(AttoscopeError, match="expected one of xavier"):
        fits("kaiming", layered)


@lru_cache(maxsize=3)
def fresh(seed: int) -> StackSignal:
    """A causal pre-norm model of 24 layers from its configuration."""
    config = transformers.LlamaConfig(
        num_hidden_layers=24, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        vocab_size=500, initializer_range=RANGE, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    built = build(config, seed=seed)
    return signal_of(built.subject, [synthetic_batch(built, 4, 96, seed)], seed=seed).stacks[0]


def curves(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and measured variance at each layer, means over seeds: what enters (gradients),
    what leaves (the stream)."""
    told, seen = [], []
    for seed in SEEDS:
        both = fresh(seed).sublayers[0 if part == "gradient" else 1 :: 2]
        told.append([getattr(one.predicted, part).variance for one in both])
        seen.append([getattr(one.measured, part).variance for one in both])
        if part == "gradient":
            told[-1] = [v / seen[-1][-1] for v in told[-1]]
            seen[-1] = [v / seen[-1][-1] for v in seen[-1]]
    return np.mean(told, 0), np.mean(seen, 0)


def test_a_fresh_model_of_24_layers_is_foreseen() -> None:
    told, seen = curves("after")
    assert np.abs(told / seen - 1).max() < 0.10
    assert all(fresh(seed).fit.r2 > 0.95 for seed in SEEDS)  # type: ignore[union-attr]
    assert fresh(0).forward.kind == fresh(0).measured_forward.kind == "linear"  # type: ignore[union-attr]


def test_its_gradients_are_foreseen() -> None:
    told, seen = curves("gradient")
    error = np.square(np.log(told) - np.log(seen)).sum()
    assert 1 - error / np.square(np.log(seen) - np.log(seen).mean()).sum() > 0.95
    assert fresh(0).backward.kind == fresh(0).measured_backward.kind == "hyperbolic"  # type: ignore[union-attr]


def test_tokens_without_correlation_are_not_foreseen() -> None:
    """The control: with r forced to 0 the same chain misses by more than 10 %."""
    config = transformers.LlamaConfig(
        num_hidden_layers=24, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        vocab_size=500, initializer_range=RANGE, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    built = build(config)
    batch = synthetic_batch(built, 4, 96)
    reader = WeightReader(built.subject, batch)
    stream = fresh(0).sublayers[0].predicted.before.variance * np.eye(96)  # type: ignore[union-attr]
    for one in sublayers(built.subject, batch):
        stream = np.diag(step(reader.read(one), stream, causal=True)[1].diagonal())
    seen = fresh(0).sublayers[-1].measured.after.variance  # type: ignore[union-attr]
    assert abs(float(stream.diagonal().mean()) / seen - 1) > 0.10


def encoder(pre: bool, width: int = 128, layers: int = 12) -> tuple[Subject, Batch]:
    """torch's own encoder with variances 1/d in attention and 2/(5d) in the MLP, no biases."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        width, 4, 4 * width, 0.0, batch_first=True, norm_first=pre
    )
    model = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            size = 1 / width if "attn" in name else 2 / sum(p.shape)
            nn.init.normal_(p, std=size**0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
    x = 0.2**0.5 * torch.randn(4, 1, width) + 0.8**0.5 * torch.randn(4, 64, width)
    return Subject.of(model.eval(), name="encoder"), Batch(x, (0, 1, 2, 3))


@pytest.mark.parametrize("pre", [True, False])
def test_torchs_encoder(pre: bool) -> None:
    subject, batch = encoder(pre)
    found = signal_of(subject, [batch]).stacks[0]
    assert found.norm == ("pre" if pre else "post")
    assert found.fit is not None and found.fit.error < 0.2
    assert found.fit.r2_backward > 0.9
    for one in found.sublayers:
        assert one.predicted is not None and one.measured is not None
        assert one.predicted.after.correlation == pytest.approx(
            one.measured.after.correlation, abs=0.06
        )
    names = [one.name for one in found.initialisers]
    assert names == ["xavier", "deepscalelm"] + ([] if pre else ["admin", "deepnet"])
    if not pre:
        assert found.backward.factor > 5  # gradients vanish towards the input
        assert found.initialisers[-1].backward.kind == "conserved"
    assert all(p.grad is None for p in subject.model.parameters())


def test_what_cannot_be_predicted_is_measured_and_said() -> None:
    subject, batch = make("gemma2")
    found = signal_of(subject, [batch])
    stack = found.stacks[0]
    assert "its output is normalised before it is added" in stack.reason
    assert stack.fit is None and all(one.predicted is None for one in stack.sublayers)
    assert stack.measured_forward is not None
    assert "nothing can be predicted" in str(found)
    json.dumps(found.to_dict())


def test_one_correlation_for_all_pairs_gives_the_same_curves() -> None:
    """Beside the closed forms of the components, chained for one correlation: an encoder."""
    from attoscope.prediction.propagation import initialiser_plans, propagate

    plans = initialiser_plans("xavier", 8, 64)
    d, h = 64, 256
    square = {"query": (1 / d, d, d), "key": (1 / d, d, d), "value": (1 / d, d, d)}
    rows = [branch("attention", **square, output=(1 / d, d, d)), mlp()] * 8
    rows[1::2] = [branch("mlp", **{"in": (2 / (d + h), d, h), "out": (2 / (d + h), h, d)})] * 8
    rows[1::2] = [replace(b, sublayer=mlp().sublayer) for b in rows[1::2]]
    mine = forecast(rows, Pair(1.0, 0.2), Pair(1.0, 0.1), length=64, causal=False)
    theirs = propagate(plans, r0=0.2, rg=0.1, length=64)
    told = [one.after.variance for one in mine]
    assert told == pytest.approx(list(theirs.variance[1:]), rel=1e-3)
    told = [one.after.correlation for one in mine]
    assert told == pytest.approx(list(theirs.correlation[1:]), abs=2e-3)
    told = [one.gradient.variance for one in mine]
    assert told == pytest.approx(list(theirs.gradient[:-1]), rel=2e-2)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit", "nano", "encoder_time_first"])
def test_every_kind_of_model(name: str) -> None:
    subject, batch = make(name)
    found = signal_of(subject, [batch])
    assert {s.stack for s in found.stacks} == {s.name for s in subject.layout(batch).stacks}
    json.dumps(found.to_dict())
    assert str(found).startswith(("Encoder", "Decoder"))


def test_a_deep_configuration(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        n_layer=32, n_embd=64, n_head=4, vocab_size=300, bos_token_id=0, eos_token_id=0
    )
    config.save_pretrained(tmp_path)
    found = predict(tmp_path, max_tokens=24)
    assert found.smoothing is None and found.signal is not None
    stack = found.signal.stacks[0]
    assert stack.layers == 32 and stack.fit is not None
    few = build(config, whole=1000)
    short = signal_of(few.subject, [synthetic_batch(few, 4, 24)], layers=32).stacks[0]
    assert len(short.sublayers) == 64 and short.fit is None
    whole = [one.predicted.after.variance for one in stack.sublayers]  # type: ignore[union-attr]
    told = [one.predicted.after.variance for one in short.sublayers]  # type: ignore[union-attr]
    assert told == pytest.approx(whole, rel=0.1)
    other = predict(tmp_path, max_tokens=24, init="deepscalelm").signal
    assert other is not None and other.stacks[0].forward.kind == "conserved"
    assert other.stacks[0].measured_forward is None
    with pytest.raises(AttoscopeError, match="init: admin is not for this stack"):
        predict(tmp_path, max_tokens=24, init="admin")


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "bart"])
def test_every_diagnosis_has_the_variance_of_the_stream(name: str) -> None:
    subject, batch = make(name)
    made = diagnose(subject, batch, null=False)
    found = {reading.name: reading for reading in made.reading_list}
    variance, correlation = found["stream_variance"], found["token_correlation"]
    assert variance.dims == correlation.dims == ("layer",)
    layers = [f"{s.name}.{i}" for s in subject.layout(batch).stacks for i in s.layers]
    assert list(variance.coords["layer"]) == layers
    assert variance.null is not None
    if name == "bart":  # its decoder has cross attention
        assert np.isnan(variance.null[3:]).all() and "cross attention" in variance.reason
    else:
        assert np.isfinite(variance.null).all() and not variance.reason
    if name == "gpt2":
        seen: list[Passing] = []
        watch_sublayers(subject, batch, seen.append)
        after = seen[-1].after[seen[-1].valid].double()
        assert variance.values[-1] == pytest.approx(float(after.var(unbiased=False)))


def test_a_model_without_a_residual_has_no_such_readings() -> None:
    subject, batch = make("attention")
    assert signal_readings(subject, [batch]) == ()
