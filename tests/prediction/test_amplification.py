"""Dependency, amplification, output change and gradient norms: known values, and real models."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attoscope
from attoscope import AttoscopeError
from attoscope.prediction import amplifying as module
from attoscope.prediction.amplifying import (
    Amplification,
    Dependency,
    amplification,
    fit,
    output_change,
    residual_dependency,
    sublayer_gradient_norms,
)
from attoscope.trace import Batch, Subject
from attoscope.trace.types import Site
from tests.models import HEADS, TOKENS, WIDTH, make
from tests.remedies.treated import data_of, hooks, sized

EVERY = (
    "bert", "roberta", "gpt2", "llama", "vit", "t5", "bart", "encoder", "encoder_time_first",
    "albert", "nano", "bloom", "mpnet", "modernbert",
)  # fmt: skip


def encoder(pre: bool = False, layers: int = 3) -> tuple[nn.TransformerEncoder, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 48, dropout=0.0, batch_first=True, norm_first=pre, dtype=torch.float64
    )
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model, torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)


def std(rows: Tensor) -> float:
    return float(rows.std(-1).mean())


def branches(layer: Any, pre: bool) -> list[Any]:
    """(branch of a stream, norm of the sum) for both sub-layers of torch's own layer."""

    def attend(x: Tensor) -> Tensor:
        found: Tensor = layer.self_attn(x, x, x, need_weights=False)[0]
        return found

    def feed(x: Tensor) -> Tensor:
        found: Tensor = layer.linear2(torch.relu(layer.linear1(x)))
        return found

    if pre:
        return [
            (lambda x: attend(layer.norm1(x)), None),
            (lambda x: feed(layer.norm2(x)), None),
        ]
    return [(attend, layer.norm1), (feed, layer.norm2)]


# The decomposition.


@pytest.mark.parametrize("name", EVERY)
def test_the_parts_add_up_to_the_stream(name: str) -> None:
    subject, batch = sized(name)
    subject.model.double()
    for found in residual_dependency(subject, batch):
        assert found.error < 2e-14
        count = len(found.sites)
        assert found.beta.shape == (count, count + 1)
        assert torch.equal(found.beta[:, 1:], found.beta[:, 1:].tril())
        assert float(found.own.min()) > 0 and 0.3 < float(found.squares.min())


def test_sandwich_norms_in_float32() -> None:
    subject, batch = sized("gemma2")
    (found,) = residual_dependency(subject, batch)
    assert found.error < 1e-5 and len(found.sites) == 6


def test_pre_norm_shares_are_those_of_the_branches() -> None:
    """`beta_{i,j} = std(a_j) / std(x_i)`: nothing happens to a branch after it was added."""
    model, x = encoder(pre=True)
    (found,) = residual_dependency(model, x)
    parts, stream = [x], x
    with torch.no_grad():
        for layer in model.layers:
            for branch, _ in branches(layer, pre=True):
                parts.append(branch(stream))
                stream = stream + parts[-1]
                row = len(parts) - 2
                expected = [std(part) / std(stream) for part in parts]
                assert found.beta[row, : row + 2].tolist() == pytest.approx(expected, rel=1e-12)


def test_post_norm_shares_by_hand() -> None:
    """The last row, with each norm's statistics kept: parts go through every later norm."""
    model, x = encoder()
    (found,) = residual_dependency(model, x)
    parts, stream = [x], x
    with torch.no_grad():
        for layer in model.layers:
            for branch, norm in branches(layer, pre=False):
                parts.append(branch(stream))
                total = stream + parts[-1]
                scale = (total.var(-1, correction=0, keepdim=True) + norm.eps).rsqrt()
                parts = [(p - p.mean(-1, keepdim=True)) * scale * norm.weight for p in parts]
                stream = norm(total)
    expected = [std(part) / std(stream) for part in parts]
    assert found.beta[-1].tolist() == pytest.approx(expected, rel=1e-12)


def test_one_number_on_the_skip_is_followed_and_folding_changes_nothing() -> None:
    model, x = encoder()
    plain = residual_dependency(model, x)[0]
    treatment = attoscope.treat(model, "admin", x, scale="O(1)", vector=False)
    treated = residual_dependency(model, x)[0]
    assert treated.error < 2e-14
    assert len(treated.sites) == len(plain.sites) == 6
    assert float(treated.own.max()) < float(plain.own.min())
    treatment.fold()
    folded = residual_dependency(model, x)[0]
    torch.testing.assert_close(folded.beta, treated.beta, rtol=1e-9, atol=1e-9)


def test_a_factor_for_each_feature_is_followed() -> None:
    model, x = encoder()
    treatment = attoscope.treat(model, "admin", x)
    with torch.no_grad():
        for omega in treatment.parameters():
            omega.mul_(1 + torch.rand(WIDTH))
    (found,) = residual_dependency(model, x)
    assert found.error < 2e-14 and len(found.sites) == 6


def test_padding_and_the_number_of_tokens() -> None:
    subject, batch = make("encoder")
    found = []
    for size in (1.0, 50.0):
        inputs = dict(batch.inputs)
        inputs["src"] = torch.where(batch.valid[..., None], 1.0, size) * inputs["src"]  # type: ignore[index]
        given = Batch(inputs, batch.documents, batch.valid)
        found.append(residual_dependency(subject, given)[0])
    torch.testing.assert_close(found[0].beta, found[1].beta, rtol=1e-5, atol=1e-6)
    assert found[0].tokens == int(batch.valid.sum())  # type: ignore[union-attr]
    assert residual_dependency(subject, batch, tokens=5)[0].tokens == 5
    with pytest.raises(AttoscopeError, match="tokens: got 0; expected at least 1"):
        residual_dependency(subject, batch, tokens=0)


def test_the_model_comes_back_as_it_was() -> None:
    subject, batch = sized("bert")
    model = subject.model.train()
    state = copy.deepcopy(model.state_dict())
    residual_dependency(subject, batch)
    output_change(subject, batch, samples=2)
    sublayer_gradient_norms(subject, batch)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert hooks(model) == 0 and all(m.training for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_norm_that_is_a_function_is_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            total = x + self.attention(x, x, x, need_weights=False)[0]
            return nn.functional.layer_norm(total, (WIDTH,))

    x = torch.randn(2, 5, WIDTH)
    with pytest.raises(AttoscopeError, match="its sum is normalised by a function"):
        residual_dependency(nn.Sequential(Block(), Block(), Block()), x)


def test_a_stream_that_is_not_finite_is_refused() -> None:
    model, x = encoder(pre=True)
    with torch.no_grad():
        model.layers[1].linear2.bias.fill_(math.inf)
    with pytest.raises(
        AttoscopeError, match=r"encoder.1.mlp: the stream after it is not finite"
    ):
        residual_dependency(model, x)


def test_a_stream_that_changes_between_sub_layers_is_refused() -> None:
    model, x = encoder(pre=True)
    shift = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)[:, None]

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model.layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) * (2 + shift)
            return x

    with pytest.raises(AttoscopeError, match="not what the sub-layer before gave"):
        residual_dependency(Shifted(), x)


# Growth.


def made(own: list[float]) -> Amplification:
    """The amplification of a stack with these own shares, squared."""
    count = len(own)
    beta = torch.zeros(count, count + 1, dtype=torch.float64)
    beta[range(count), range(1, count + 1)] = torch.tensor(own, dtype=torch.float64).sqrt()
    sites = tuple(Site("encoder", i // 2, "mlp") for i in range(count))
    return module._amplified(Dependency("encoder", sites, beta, 0.0, 8, 64))


def test_equal_branches_of_a_pre_norm_stack_make_a_harmonic_sum() -> None:
    found = made([1 / (i + 1) for i in range(1, 25)])
    assert found.total == pytest.approx(sum(1 / k for k in range(2, 26)))
    assert found.verdict == "logarithmic"
    assert found.predicted_change(0.1) == pytest.approx(2 * 0.01 * 64 * found.total)
    assert "grow logarithmic" in str(found)


def test_equal_branches_of_a_post_norm_stack_make_half_their_number() -> None:
    found = made([0.5] * 24)
    assert found.total == pytest.approx(12.0)
    assert found.verdict == "linear" and found.linear.slope == pytest.approx(0.5)
    assert found.linear.r2 == pytest.approx(1.0) and found.linear.intercept == pytest.approx(
        0.0
    )
    assert made([0.5] * 5).verdict == "too short"


def test_fits_of_exact_points() -> None:
    n = np.arange(1.0, 9.0)
    line = fit(np.log(n), 2 + 3 * np.log(n))
    assert (line.intercept, line.slope, line.r2) == pytest.approx((2.0, 3.0, 1.0))
    assert fit(n, np.full(8, 4.0)).r2 == 1.0
    assert fit(n[:1], n[:1]) == module.Fit(1.0, 0.0, 1.0)


@pytest.mark.parametrize("pre", [False, True])
def test_untrained_stacks_grow_as_the_theorem_says(pre: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=pre)
    model = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    (found,) = amplification(model, torch.randn(2, 16, 64))
    assert found.verdict == ("logarithmic" if pre else "linear")
    assert (found.total < 4) == pre
    (changed,) = output_change(model, torch.randn(2, 16, 64), samples=4)
    assert changed.changes.shape == (4, 48)
    ratio = float(changed.relative[:, 1].mean()) / float(found.sums[1])
    assert 1.6 < ratio < 2.5


# Measured changes.


def test_changes_are_quadratic_in_the_noise_and_repeatable() -> None:
    model, x = encoder(pre=True)
    small, large, again, other = (
        output_change(model, x, eps=eps, samples=3, seed=seed)[0]
        for eps, seed in ((1e-5, 0), (1e-4, 0), (1e-4, 0), (1e-4, 1))
    )
    torch.testing.assert_close(small.relative, large.relative, rtol=1e-2, atol=0)
    assert torch.equal(large.changes, again.changes)
    assert not torch.equal(large.changes, other.changes)
    output = large.changes[:, -1]
    assert large.mean == pytest.approx(float(output.mean()))
    assert large.median == float(output.median())
    assert large.standard_error == pytest.approx(float(output.std() / 3**0.5))


def test_the_change_is_that_of_the_weights() -> None:
    """One draw, made again by hand: the normalised output before and after."""
    model, x = encoder(layers=1)
    (found,) = output_change(model, x, eps=0.01, samples=1, seed=5)
    names = [
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight",
        "linear2.weight",
    ]  # fmt: skip
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    unit = nn.LayerNorm(WIDTH, eps=0.0, elementwise_affine=False)
    sums = []
    with torch.no_grad():
        for name in names:
            weight = other.layers[0].get_parameter(name)
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(0.01 * weight.std() * noise)
        for each in (model, other):
            layer: Any = each.layers[0]
            stream = x
            for branch, norm in branches(layer, pre=False):
                total = stream + branch(stream)
                stream = norm(total)
            sums.append(unit(total))
    expected = (sums[0] - sums[1]).square().sum(-1).mean()
    assert float(found.changes[0, -1]) == pytest.approx(float(expected), rel=1e-9)


def test_weights_come_back_when_the_model_fails() -> None:
    model, x = encoder()
    before = copy.deepcopy(model.state_dict())
    found = attoscope.trace.sublayers.sublayers(Subject.of(model), Batch(x, (0, 1)))
    with pytest.raises(RuntimeError, match="stop"):
        with module._changed(model, found, 0.1, torch.Generator()):
            assert not torch.equal(
                model.layers[0].linear1.weight, before["layers.0.linear1.weight"]
            )
            raise RuntimeError("stop")
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    for options in ({"eps": 0.0}, {"samples": 0}):
        with pytest.raises(AttoscopeError, match="expected both above 0"):
            output_change(model, x, **options)


# Gradients.


@pytest.mark.parametrize("pre", [False, True])
def test_gradient_norms_are_those_of_autograd(pre: bool) -> None:
    model, x = encoder(pre=pre)

    def loss(output: Tensor) -> Tensor:
        return output.pow(3).sum()

    (found,) = sublayer_gradient_norms(model, x, loss=loss)
    streams, stream = [], x.clone().requires_grad_()
    for layer in model.layers:
        for branch, norm in branches(layer, pre=pre):
            streams.append(stream)
            total = stream + branch(stream)
            stream = total if norm is None else norm(total)
    gradients = torch.autograd.grad(loss(stream), streams)
    assert found.norms.tolist() == pytest.approx([float(g.norm()) for g in gradients], rel=1e-6)
    assert found.ratio == pytest.approx(
        float(gradients[0].norm() / gradients[-1].norm()), rel=1e-6
    )


def test_gradient_norms_use_the_loss_of_the_model_and_treat_stacks_apart() -> None:
    subject, batch = sized("bart")
    plain = sublayer_gradient_norms(subject, batch)
    assert [(one.stack, len(one.norms)) for one in plain] == [("encoder", 6), ("decoder", 9)]
    assert all(bool((one.norms > 0).all()) for one in plain)
    labels = batch.inputs["decoder_input_ids"]
    given = Batch({**batch.inputs, "labels": labels}, batch.documents, batch.valid,
                  decoder_valid=batch.decoder_valid)  # fmt: skip
    own = sublayer_gradient_norms(subject, given)
    named = sublayer_gradient_norms(subject, given, loss=lambda output: output.loss)
    for one, other in zip(own, named, strict=True):
        assert torch.equal(one.norms, other.norms)


def test_a_hugging_face_model_needs_no_data() -> None:
    subject, batch = make("bert")
    assert data_of(subject, batch) is None
    (found,) = amplification(subject.model)
    assert len(found.sums) == 6 and str(found).startswith("encoder: own shares squared add up")
    assert "own share" in str(found.dependency)
