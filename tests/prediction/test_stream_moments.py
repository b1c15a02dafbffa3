"""Moments of the stream with known answers; weights and growth laws read off."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.moments.measured import MomentTally, token_correlation
from attoscope.prediction.branch_weights import WeightReader
from attoscope.prediction.building import build, is_configuration, synthetic_batch
from attoscope.prediction.growth import depth_verdict, r_squared
from attoscope.prediction.stream_moments import measure
from attoscope.trace import Subject
from attoscope.trace.sublayers import sublayers
from tests.models import HEADS, WIDTH, make, make_batch


def small(**options: int) -> transformers.GPT2Config:
    given = {"n_head": 4, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0, **options}
    return transformers.GPT2Config(**given)


def test_correlation_of_two_tokens_by_hand() -> None:
    # One feature, tokens 1 and 3: mean 2, variance 1, and (-1)(1) for the one pair.
    assert token_correlation(torch.tensor([[[1.0], [3.0]]])) == pytest.approx(-1)
    # Two documents whose tokens are equal: all of the variance is shared.
    equal = torch.tensor([[[1.0], [1.0]], [[3.0], [3.0]]])
    assert token_correlation(equal) == pytest.approx(1)
    assert math.isnan(token_correlation(torch.ones(1, 1, 4)))


@pytest.mark.parametrize("r", [0.0, 0.3, 0.8])
def test_correlation_of_equicorrelated_tokens(r: float) -> None:
    shared, own = torch.randn(8, 1, 4000), torch.randn(8, 16, 4000)
    h = 0.7 + 2 * (r**0.5 * shared + (1 - r) ** 0.5 * own)
    assert token_correlation(h) == pytest.approx(r, abs=0.01)


def test_padding_does_not_count_and_batches_add_up() -> None:
    h = torch.randn(4, 6, 50, dtype=torch.float64) + torch.randn(4, 1, 50, dtype=torch.float64)
    valid = torch.ones(4, 6, dtype=torch.bool)
    valid[1, 3:] = False
    spoilt = h.masked_fill(~valid[..., None], 1e6)
    whole, parts = MomentTally(), MomentTally()
    whole.add(h, valid)
    parts.add(spoilt[:2], valid[:2])
    parts.add(spoilt[2:], valid[2:])
    one, two = whole.moments(), parts.moments()
    x = h[valid]
    assert one.mean == pytest.approx(float(x.mean()))
    assert one.variance == pytest.approx(float(x.var(unbiased=False)))
    assert (two.mean, two.variance) == pytest.approx((one.mean, one.variance))
    assert two.correlation == pytest.approx(one.correlation)


def test_the_formula_of_the_paper() -> None:
    h = torch.randn(3, 5, 7, dtype=torch.float64)
    c = h - h.mean()
    n = 5
    covariance = ((c.sum(1).square() - c.square().sum(1)) / (n * (n - 1))).mean()
    assert token_correlation(h) == pytest.approx(float(covariance / c.square().mean()))


def test_growth_laws_by_name() -> None:
    n = np.arange(1, 25)
    assert depth_verdict(1 + 1.2 * n).kind == "linear"
    assert depth_verdict(1.1**n).kind == "exponential"
    assert depth_verdict(24 / n, backward=True).kind == "hyperbolic"
    assert depth_verdict(0.5**n, backward=True).kind == "exponential"
    assert depth_verdict(1 + 0.2 * np.sin(n)).kind == "conserved"
    assert depth_verdict([1.0, 5.0, 9.0]).kind == "unclear"
    assert depth_verdict([1.0, -5.0]).kind == "unclear"
    assert depth_verdict(24 / n, backward=True).factor == pytest.approx(1 / 24)


def test_r_squared() -> None:
    observed = np.array([1.0, 2.0, 3.0])
    assert r_squared(observed, observed) == 1
    assert r_squared(observed, np.full(3, 2.0)) == 0
    assert math.isnan(r_squared(np.ones(3), observed))


def test_weights_by_role_whatever_their_layout() -> None:
    """Queries, keys and values get variances of their own, in fused matrices as in separate."""
    wanted = {"query": 1.0, "key": 4.0, "value": 9.0}
    for name, fill in (("gpt2", _fill_gpt2), ("encoder", _fill_torch), ("llama", _fill_llama)):
        subject, batch = make(name)
        fill(subject.model, wanted)
        reader = WeightReader(subject, batch)
        for one in sublayers(subject, batch):
            if one.kind == "attention":
                found = reader.read(one)
                assert not found.reason
                for role, square in wanted.items():
                    assert found.roles[role].square == pytest.approx(square, rel=1e-4), name  # type: ignore[index]


def _fill_gpt2(model: nn.Module, squares: dict[str, float]) -> None:
    for block in model.transformer.h:  # type: ignore[union-attr]
        parts = block.attn.c_attn.weight.data.split(WIDTH, 1)  # type: ignore[union-attr]
        for part, square in zip(parts, squares.values(), strict=True):
            part.fill_(square**0.5)


def _fill_torch(model: nn.Module, squares: dict[str, float]) -> None:
    for block in model.layers:  # type: ignore[union-attr]
        for part, square in zip(
            block.self_attn.in_proj_weight.data.chunk(3), squares.values(), strict=True
        ):  # type: ignore[union-attr]
            part.fill_(square**0.5)


def _fill_llama(model: nn.Module, squares: dict[str, float]) -> None:
    for block in model.model.layers:  # type: ignore[union-attr]
        for letter, square in zip("qkv", squares.values(), strict=True):
            getattr(block.self_attn, f"{letter}_proj").weight.data.fill_(square**0.5)  # type: ignore[union-attr]


def test_the_gain_in_front_counts() -> None:
    subject, batch = make("gpt2")
    block = subject.model.transformer.h[0]  # type: ignore[union-attr]
    block.ln_2.weight.data.copy_(torch.tensor([3.0, 0.0]).repeat(WIDTH // 2))  # type: ignore[union-attr]
    block.mlp.c_fc.weight.data.fill_(2.0)  # type: ignore[union-attr]
    mlp = sublayers(subject, batch)[1]
    roles = WeightReader(subject, batch).read(mlp).roles
    assert roles["in"].square == pytest.approx(4 * 9 / 2, rel=1e-4)
    assert (roles["in"].inputs, roles["in"].outputs) == (WIDTH, 4 * WIDTH)


@pytest.mark.parametrize(
    ("name", "index", "reason"),
    [
        ("gemma2", 0, "its output is normalised before it is added"),
        ("bart", 7, "cross attention reads another stream"),
        ("mixtral", 1, "several experts"),
    ],
)
def test_what_the_theory_has_no_words_for(name: str, index: int, reason: str) -> None:
    subject, batch = make(name)
    found = WeightReader(subject, batch).read(sublayers(subject, batch)[index])
    assert found.reason.startswith(reason)


def test_measuring_a_model_by_hand() -> None:
    """`x + W x` with W = w I: branch w^2 s, sum (1+w)^2 s, gradient (1+w)^2 g."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
            self.map = nn.Linear(WIDTH, WIDTH, bias=False)
            self.map.weight.data = 0.5 * torch.eye(WIDTH)
            self.attention.out_proj.weight.data.zero_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return x + self.map(x)

    subject, batch = Subject.of(Block().eval()), make_batch("floats")
    attention, mlp = measure(subject, [batch], sublayers(subject, batch))
    variance = float(batch.inputs.double().var(unbiased=False))
    assert attention.before.variance == pytest.approx(variance)
    assert attention.branch.variance == 0
    assert mlp.branch.variance == pytest.approx(0.25 * variance)
    assert mlp.after.variance == pytest.approx(2.25 * variance)
    assert mlp.gradient.variance == pytest.approx(2.25 * mlp.after_gradient.variance, rel=1e-5)
    assert mlp.gradient.correlation == pytest.approx(mlp.after_gradient.correlation, abs=1e-5)


def test_a_deep_configuration_is_built_with_few_layers_and_its_own_scales() -> None:
    config = small(n_layer=48, n_embd=128)
    whole, few = build(config), build(config, whole=1000)
    assert whole.whole and not few.whole
    assert (few.layers, few.made) == (48, 2)
    assert few.parameters == sum(p.numel() for p in whole.subject.model.parameters())
    assert few.subject.config.num_hidden_layers == 2 and config.n_layer == 48
    wanted = 0.02 / math.sqrt(2 * 48)
    for each in (whole, few):
        last = [
            p.detach()
            for n, p in each.subject.model.named_parameters()
            if n.endswith("c_proj.weight")
        ]
        assert float(last[1].std()) == pytest.approx(wanted, rel=0.02)


def test_configurations_are_told_from_models(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    transformers.GPT2Config(n_layer=2).save_pretrained(folder)
    assert is_configuration(folder) and is_configuration(folder / "config.json")
    assert is_configuration(transformers.LlamaConfig())
    assert not is_configuration(make("gpt2")[0]) and not is_configuration("some/model")
    (folder / "model.safetensors").write_bytes(b"")
    assert not is_configuration(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(AttoscopeError, match="its configuration cannot be read"):
        build(folder / "config.json")


def test_zipf_documents_repeat_words() -> None:
    config = small(n_layer=1, n_embd=32, vocab_size=1000)
    ids = synthetic_batch(build(config), 64, 128).inputs["input_ids"]
    p = 1 / np.arange(1, 1001)
    p /= p.sum()
    pairs = [(row[:, None] == row[None, :]).float().mean() - 1 / 128 for row in ids]
    assert float(torch.stack(pairs).mean()) == pytest.approx((p**2).sum() * 127 / 128, rel=0.15)
