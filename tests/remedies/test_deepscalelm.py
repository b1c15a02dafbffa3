"""DeepScaleLM: known variances, exact factors and folds, and a deep model that keeps its scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attoscope
from attoscope import AttoscopeError
from attoscope.moments.unit_variance import (
    Branch,
    entering_correlations,
    mlp_correlation,
    residual_factors,
    weight_variance,
)
from attoscope.remedies.residual_scales import ResidualScale
from attoscope.trace import Batch, Subject
from attoscope.trace.sublayers import Passing, watch_sublayers
from tests.models import make
from tests.remedies.treated import data_of, hooks, output

MODELS = ("bert", "gpt2", "llama", "vit", "bloom", "qwen3", "encoder", "nano")
OPTIONS: dict[str, Any] = {"count": "sublayers"}


def recursion(layers: int, square: float, dropout: float = 0.1) -> list[float]:
    skip, branch = math.sqrt(1 - square), math.sqrt(square)
    order = [Branch("attention", dropout), Branch("mlp", dropout)] * layers
    return entering_correlations(order, 0.221 * (1 - dropout), skip, branch)


def deviation(r: float, width: int) -> float:
    return math.sqrt(weight_variance("value", width, width, r, Branch("attention", 0.1)))


def test_known_standard_deviations() -> None:
    r = recursion(192, 0.005)
    found = [deviation(r[2 * layer], 1024) for layer in (0, 1, 95, 191)]
    expected = [0.04557765, 0.04532842, 0.03615816, 0.03378788]
    np.testing.assert_allclose(found, expected, atol=1e-8)
    np.testing.assert_allclose(
        [r[0], r[2], r[192], r[384]], [0.1989, 0.20331072, 0.50435298, 0.65971556], atol=1e-8
    )
    mlp = Branch("mlp", 0.1)
    both = [
        weight_variance("in", 1024, 4096, 0.3, mlp),
        weight_variance("out", 4096, 1024, 0.3, mlp),
    ]
    np.testing.assert_allclose(np.sqrt(both), 0.02559488, atol=1e-8)
    assert weight_variance("query", 1024, 1024, 0.3, Branch("attention")) == 0.03125**2
    small = recursion(12, 1 / 6)
    found = [deviation(small[2 * layer], 256) for layer in (0, 1, 2, 3, 11)]
    expected = [0.09115531, 0.07990027, 0.07459400, 0.07146980, 0.06467814]
    np.testing.assert_allclose(found, expected, atol=1e-8)
    assert small[-1] == pytest.approx(0.79450771, abs=1e-8)


def test_activations_of_other_kinds() -> None:
    assert mlp_correlation(0.5) == pytest.approx(0.6089977810, abs=1e-9)
    assert mlp_correlation(0.5, "silu", gated=True) == pytest.approx(0.257423, abs=1e-6)
    gelu = weight_variance("out", 256, 64, 0.2, Branch("mlp", 0.1, "gelu"))
    assert gelu == pytest.approx(0.9 / (0.4252214826 * 256), rel=1e-9)
    silu = weight_variance("out", 256, 64, 0.2, Branch("mlp", 0.0, "silu", gated=True))
    assert silu == pytest.approx(1 / (0.3557755198 * 256), rel=1e-6)


def test_factors() -> None:
    skip, branch = residual_factors(48)
    assert branch**2 == pytest.approx(2 / 48) and skip**2 + branch**2 == pytest.approx(1)
    assert residual_factors(16, k=1.0, alpha=0.5)[1] ** 2 == pytest.approx(1 / 4)
    with pytest.raises(AttoscopeError, match="beta\\^2 = 1"):
        residual_factors(2)


def additions(subject: Subject, batch: Batch) -> list[Passing]:
    kept: list[Passing] = []
    watch_sublayers(subject, batch, kept.append)
    return kept


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "encoder", "nano"])
def test_every_sum_is_lambda_x_plus_beta_f(name: str) -> None:
    subject, batch = make(name)
    treatment = attoscope.treat(
        subject.model, "deepscalelm", data_of(subject, batch), **OPTIONS
    )
    skip, branch = residual_factors(6)
    seen = additions(subject, batch)
    assert len(seen) == 6 == treatment.layers[0]
    first = seen[0]
    for module in treatment.modules:
        if isinstance(module, ResidualScale):
            module.skip = module.branch = 1.0
    plain = additions(subject, batch)[0]
    # The first branch reads the same stream with and without the factors.
    own = plain.after - plain.before
    expected = skip * plain.before + branch * own
    torch.testing.assert_close(
        first.after[first.valid], expected[first.valid], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", MODELS)
def test_undo_and_fold(name: str) -> None:
    subject, batch = make(name)
    before = {key: value.clone() for key, value in subject.model.state_dict().items()}
    valid = batch.valid if name in ("bert", "encoder") else None
    treatment = attoscope.treat(
        subject.model, "deepscalelm", data_of(subject, batch), **OPTIONS
    )
    assert treatment.counted in str(treatment) and " f(x), f of mlp" in str(treatment)
    treatment.undo()
    after = subject.model.state_dict()
    assert list(after) == list(before) and hooks(subject.model) == 0
    assert all(torch.equal(after[key], before[key]) for key in before)
    treatment = attoscope.treat(
        subject.model, "deepscalelm", data_of(subject, batch), **OPTIONS
    )
    expected = output(subject, batch)
    treatment.fold()
    found = output(subject, batch)
    if valid is not None:
        found, expected = found[valid], expected[valid]
    assert hooks(subject.model) == 0 and list(subject.model.state_dict()) == list(before)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    subject, batch = make(name)
    treatment = attoscope.treat(subject.model, "deepscalelm", **OPTIONS)
    subject.model.save_pretrained(tmp_path)
    back = Subject.of(attoscope.load_treated(tmp_path))
    assert torch.equal(output(back, batch), output(subject, batch))
    assert list(back.model.state_dict()) == list(subject.model.state_dict())
    (loaded,) = attoscope.remedies.treatments_of(back.model)
    assert loaded.record == treatment.record


def test_a_tied_head_reads_its_input_scaled() -> None:
    subject, _ = make("gpt2")
    treatment = attoscope.treat(subject.model, "deepscalelm", **OPTIONS)
    # Two tables of variance (1 - 0.1) / 2 and width 32.
    assert f"reads {1 / math.sqrt(0.45 * 32):.4g} times its input" in str(treatment)
    variance = float(subject.model.get_parameter("transformer.wte.weight").detach().var())
    assert variance == pytest.approx(0.45, rel=0.1)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt2", {"count": "blocks"}, "count: got 'blocks'"),
        ("gpt2", {"k": 3.0}, "beta"),
        ("gpt2", {"r0": 0.0}, "r0: got 0.0"),
        ("gemma2", OPTIONS, "norm='sandwich'"),
        ("albert", OPTIONS, "several layers"),
        ("t5", OPTIONS, "'cross'"),
        ("mixtral", OPTIONS, "no role"),
    ],
)
def test_refused(name: str, options: dict[str, Any], words: str) -> None:
    subject, batch = make(name)
    before = {key: value.clone() for key, value in subject.model.state_dict().items()}
    with pytest.raises(AttoscopeError, match=words):
        attoscope.treat(
            subject.model, "deepscalelm", batch if name == "t5" else None, **options
        )
    after = subject.model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert hooks(subject.model) == 0


LAYERS, WIDTH, TOKENS, SEEDS = 24, 256, 64, 3
Curves = dict[str, np.ndarray]


def deep(kind: str) -> tuple[nn.Module, Any]:
    """A model, and what in its output is the last stream."""
    if kind == "bert":
        import transformers

        config = transformers.BertConfig(
            vocab_size=4000, hidden_size=WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, intermediate_size=4 * WIDTH, max_position_embeddings=TOKENS,
            hidden_act="relu",
        )  # fmt: skip
        model = transformers.BertModel(config, add_pooling_layer=False)
        return model, lambda out: out.last_hidden_state
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, norm_first=True, batch_first=True)
    last = nn.LayerNorm(WIDTH)
    return nn.TransformerEncoder(
        layer, LAYERS, last, enable_nested_tensor=False
    ), lambda out: out


def alike(generator: torch.Generator, correlation: float) -> Tensor:
    """Two documents of Gaussian tokens with this correlation."""
    own = torch.randn(2, TOKENS, WIDTH, generator=generator)
    common = torch.randn(2, 1, WIDTH, generator=generator)
    return (1 - correlation) ** 0.5 * own + correlation**0.5 * common


def inputs(kind: str, generator: torch.Generator) -> Any:
    if kind != "bert":
        return alike(generator, 0.198)
    often = 1 / torch.arange(1, 4001).float()
    ids = torch.multinomial(often, 2 * TOKENS, replacement=True, generator=generator)
    second = (torch.arange(TOKENS) >= TOKENS // 3).long().expand(2, TOKENS).contiguous()
    return {"input_ids": ids.view(2, TOKENS), "token_type_ids": second}


def curves(kind: str, seed: int, *, factors: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Variance after each layer and gradient variance before it, in training mode."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, last = deep(kind)
    data = inputs(kind, generator)
    treatment = attoscope.treat(model, "deepscalelm", data, seed=seed)
    for module in treatment.modules:
        if isinstance(module, ResidualScale) and not factors:
            module.skip = module.branch = 1.0
    top, kept = alike(generator, 0.2), []
    given: Any = data if isinstance(data, dict) else data
    batch = Batch(given, (0, 1))
    watch_sublayers(
        Subject.of(model), batch, kept.append, train=True,
        gradient=lambda out: (last(out) * top).sum(),
    )  # fmt: skip
    variance = [float(one.after.var()) for one in kept[1::2]]
    gradient = [float(one.before_gradient.var()) for one in kept[::2]]
    return np.array(variance), np.array(gradient)


@pytest.mark.parametrize("kind", ["bert", "pre-norm encoder"])
def test_a_deep_model_keeps_its_scale_and_only_with_the_factors(kind: str) -> None:
    found = [curves(kind, seed) for seed in range(SEEDS)]
    variance, gradient = (np.mean([one[i] for one in found], 0) for i in range(2))
    assert 0.9 <= variance.min() and variance.max() <= 1.1
    assert 0.4 <= gradient.min() and gradient.max() <= 1.2
    variance, gradient = curves(kind, 0, factors=False)
    assert variance.max() > 1.1 and gradient.min() < 0.4
