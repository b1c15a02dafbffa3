"""Admin in live models: factors in front of the skips, profiling, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attoscope
from attoscope import AttoscopeError
from attoscope.remedies.admin import _valid, closed_form
from attoscope.trace import Batch, Subject
from attoscope.trace.sublayers import Passing, watch_sublayers
from tests.models import HEADS, TOKENS, WIDTH
from tests.remedies.postnorm import POST_NORM, encoder, valid, vary
from tests.remedies.treated import data_of, hooks, output, sized

# omega by admin-torch 0.1.0, for (number of additions, O(log n), O(1)).
TABLE = (
    (1, 1.3730950738, 1.0),
    (2, 1.3155674365, 1.4142135624),
    (6, 1.6116104978, 2.4494897428),
    (12, 2.0170092187, 3.4641016151),
    (24, 2.6012855826, 4.8989794856),
    (36, 3.0408390382, 6.0),
    (100, 4.5699656015, 10.0),
    (200, 6.0746106487, 14.1421356237),
    (400, 8.1179223997, 20.0),
)  # fmt: skip


def by_hand(model: nn.TransformerEncoder, x: Tensor, omegas: list[Tensor]) -> Tensor:
    """`norm(omega x + f(x))`, written out; `model` is plain."""
    factors = iter(omegas)
    for layer in model.layers:
        one: Any = layer
        branch = one.self_attn(x, x, x, need_weights=False)[0]
        x = one.norm1(next(factors) * x + branch)
        x = one.norm2(next(factors) * x + one.linear2(torch.relu(one.linear1(x))))
    return x


# Known values.


@pytest.mark.parametrize("row", TABLE)
def test_closed_forms_are_those_of_the_official_code(row: tuple[int, float, float]) -> None:
    import admin_torch

    count, logarithmic, constant = row
    assert closed_form(count, "O(n)") == 1.0
    assert closed_form(count, "O(logn)") == pytest.approx(logarithmic, abs=5e-11)
    assert closed_form(count, "O(1)") == pytest.approx(constant, abs=5e-11)
    for scale in ("O(n)", "O(logn)", "O(1)"):
        theirs = admin_torch.as_module(count, scale).omega
        assert float(theirs) == pytest.approx(closed_form(count, scale), rel=1e-6)


def test_closed_forms_refuse_what_they_do_not_know() -> None:
    with pytest.raises(
        AttoscopeError, match="scale: got 'O\\(n2\\)'; expected one of O\\(n\\)"
    ):
        closed_form(3, "O(n2)")
    with pytest.raises(AttoscopeError, match="additions: got 0; expected at least 1"):
        closed_form(0)


# What a treated model computes.


@pytest.mark.parametrize("vector", [True, False])
def test_the_skip_is_multiplied_and_the_branch_is_not(vector: bool) -> None:
    model, x = encoder()
    plain = copy.deepcopy(model)
    treatment = attoscope.treat(model, "admin", x, vector=vector)
    vary(treatment)
    omegas = [module.omega.detach() for module in treatment.modules]
    assert {len(omega) for omega in omegas} == {WIDTH if vector else 1}
    torch.testing.assert_close(model(x), by_hand(plain, x, omegas), rtol=0, atol=1e-12)


def test_the_sum_is_that_of_the_official_module() -> None:
    import admin_torch

    model, x = encoder(layers=2)
    plain = copy.deepcopy(model)
    attoscope.treat(model, "admin", x, scale="O(logn)", vector=False, trainable=False)
    residual = admin_torch.as_module(4)
    with torch.no_grad():
        for layer in plain.layers:
            one: Any = layer
            branch = one.self_attn(x, x, x, need_weights=False)[0]
            y = one.norm1(residual(x, branch))
            x = one.norm2(residual(y, one.linear2(torch.relu(one.linear1(y)))))
        torch.testing.assert_close(model(encoder(layers=2)[1]), x, rtol=0, atol=1e-6)


def test_a_fixed_factor_of_one_changes_no_bit() -> None:
    subject, batch = sized("bert")
    before = output(subject, batch)
    treatment = attoscope.treat(
        subject.model, "admin", scale="O(n)", vector=False, trainable=False
    )
    assert torch.equal(output(subject, batch), before)
    assert not list(treatment.parameters())
    assert [m.omega.shape for m in treatment.modules] == [torch.Size([1])] * 6


@pytest.mark.parametrize("name", POST_NORM)
def test_undo_leaves_nothing_behind(name: str) -> None:
    subject, batch = sized(name)
    before, keys = output(subject, batch), list(subject.model.state_dict())
    treatment = attoscope.treat(subject.model, "admin", data_of(subject, batch))
    changed = output(subject, batch)
    assert not torch.allclose(valid(batch, changed), valid(batch, before), atol=1e-3)
    treatment.undo()
    assert torch.equal(output(subject, batch), before)
    assert list(subject.model.state_dict()) == keys and hooks(subject.model) == 0


def test_factors_learn_and_a_copy_has_its_own() -> None:
    model, x = encoder()
    treatment = attoscope.treat(model, "admin", x)
    model(x).square().sum().backward()
    for omega in treatment.parameters():
        assert omega.grad is not None and float(omega.grad.abs().min()) > 0
    other = copy.deepcopy(model)
    expected = other(x)
    vary(treatment)
    assert torch.equal(other(x), expected)
    assert not torch.allclose(model(x), expected)


def test_checkpointed_layers_run_the_same() -> None:
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, "admin")
    grads = []
    model: Any = subject.model
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for again in (False, True):
        model.train()
        if again:
            enable = getattr(model, "activation_checkpointing_enable", None)
            enable = enable or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        model.zero_grad()
        model(**batch.inputs)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in treatment.parameters() if p.grad is not None])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


# Profiling.


def profiled(model: nn.Module, data: Any, **options: Any) -> list[float]:
    treatment = attoscope.treat(model, "admin", data, **options)
    omegas = [float(module.place.omega) for module in treatment.modules]  # type: ignore[union-attr, arg-type]
    assert [float(m.omega.detach().mean()) for m in treatment.modules] == pytest.approx(omegas)  # type: ignore[operator, union-attr]
    treatment.undo()
    return omegas


def test_profile_is_the_recursion() -> None:
    """`omega_1 = 1`, `omega_{i+1}^2 = Var(omega_i x_{i-1}) + Var(a_i)`, with x under the new
    factors."""
    model, x = encoder()
    expected, omega, stream = [], 1.0, x

    def step(branch: Tensor, norm: Any) -> Tensor:
        nonlocal omega
        expected.append(omega)
        skip = omega * stream.detach()
        omega = math.sqrt(skip.var(correction=0) + branch.detach().var(correction=0))
        result: Tensor = norm(skip + branch)
        return result

    with torch.no_grad():
        for layer in model.layers:
            one: Any = layer
            branch = one.self_attn(stream, stream, stream, need_weights=False)[0]
            stream = step(branch, one.norm1)
            stream = step(one.linear2(torch.relu(one.linear1(stream))), one.norm2)
    assert profiled(model, x) == pytest.approx(expected, rel=1e-6)
    assert expected[0] == 1.0 and expected == sorted(expected)


def test_profile_of_normalised_streams_adds_branch_variances_up() -> None:
    """`omega_i^2 = 1 + sum_{j<i} Var(a_j)` where norms have gain 1 and x_0 is normalised."""
    model, x = encoder(layers=6)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
                module.bias.zero_()
                module.eps = 0.0
    x = nn.functional.layer_norm(x, (WIDTH,), eps=0.0)
    omegas = profiled(model, x)
    treatment = attoscope.treat(model, "admin", x)
    variances: list[float] = []

    def visit(one: Passing) -> None:
        variances.append(float(one.branch.var(correction=0)))

    watch_sublayers(Subject.of(model), Batch(x, (0, 1)), visit)
    total = [1 + sum(variances[:i]) for i in range(12)]
    assert [omega**2 for omega in omegas] == pytest.approx(total, rel=1e-6)
    treatment.undo()


def test_profile_sees_dropout_and_leaves_no_trace() -> None:
    plain, x = encoder()
    model, _ = encoder(dropout=0.5)
    state = torch.random.get_rng_state()
    model.train()
    model.layers[0].eval()
    flags = [m.training for m in model.modules()]
    omegas = profiled(model, x, seed=1)
    assert omegas[1] > 1.05 * profiled(plain, x)[1]
    assert omegas == profiled(model, x, seed=1) != profiled(model, x, seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [m.training for m in model.modules()] == flags


def test_padding_is_no_part_of_the_profile() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padded = torch.randn(3, TOKENS, WIDTH), torch.zeros(3, TOKENS, dtype=torch.bool)
    padded[1, 7:] = True
    found = []
    for size in (1.0, 100.0):
        inputs = {
            "src": torch.where(padded[..., None], size * x, x),
            "src_key_padding_mask": padded,
        }
        found.append(profiled(model, Batch(inputs, (0, 1, 2), ~padded)))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_the_mask_of_a_stack_is_turned_where_time_is_first() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    batch = Batch(torch.zeros(1), (0, 1), mask, decoder_valid=mask[:, :2])
    stream = torch.zeros(2, 3, 4)
    for several, stack, given, time_first, expected in (
        (False, "decoder", stream, False, mask),
        (True, "encoder", stream, False, mask),
        (True, "decoder", stream[:, :2], False, mask[:, :2]),
        (False, "encoder", stream.transpose(0, 1), True, mask.T),
        (True, "decoder", stream, False, None),
    ):
        found = _valid(batch, stack, several, given, time_first)
        assert (found is None) == (expected is None)
        assert expected is None or torch.equal(found, expected)  # type: ignore[arg-type]


def test_encoder_and_decoder_start_anew() -> None:
    subject, batch = sized("bart")
    treatment = attoscope.treat(subject.model, "admin", batch)
    places: Any = [module.place for module in treatment.modules]
    starts = [p.omega for p in places if p.layer == 0 and p.kind == "attention"]
    assert starts == [1.0, 1.0]
    assert {p.stack: p.count for p in places} == {"encoder": 6, "decoder": 9}


# What is refused.


@pytest.mark.parametrize("remedy", ["admin", "deepnet"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "t5", "gemma2", "nano"])
def test_models_that_are_not_post_norm_are_refused(name: str, remedy: str) -> None:
    subject, batch = sized(name)
    before, keys = output(subject, batch), list(subject.model.state_dict())
    with pytest.raises(
        AttoscopeError, match=r"got a (pre|sandwich)-norm sub-layer .*expected a po"
    ):
        attoscope.treat(subject.model, remedy, data_of(subject, batch))
    assert torch.equal(output(subject, batch), before)
    assert list(subject.model.state_dict()) == keys and hooks(subject.model) == 0


def test_two_factors_on_one_skip_are_refused() -> None:
    subject, _ = sized("bert")
    treatment = attoscope.treat(subject.model, "admin")
    for remedy in ("admin", "deepnet"):
        with pytest.raises(AttoscopeError, match="has a factor of 'admin' already"):
            attoscope.treat(subject.model, remedy)
    treatment.undo()
    attoscope.treat(subject.model, "deepnet")


def test_shared_layers_cannot_be_profiled() -> None:
    subject, _ = sized("albert")
    with pytest.raises(AttoscopeError, match="scale: got 'profile' for a model whose layers"):
        attoscope.treat(subject.model, "admin")
    assert hooks(subject.model) == 0


def test_a_branch_that_reads_something_else_is_refused() -> None:
    class Positions(nn.Module):
        """Queries and keys read the stream with positions added, as in DETR."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = x + torch.linspace(-1, 1, WIDTH)
            result: Tensor = self.norm(x + self.attention(y, y, x, need_weights=False)[0])
            return result

    model, x = nn.Sequential(Positions(), Positions()), torch.randn(2, 5, WIDTH)
    with pytest.raises(AttoscopeError, match="does not read the stream of this sub-layer"):
        attoscope.treat(model, "admin", x)
    assert hooks(model) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "log"}, "scale: got 'log'; expected one of profile"),
        ({"vector": True, "trainable": False}, "vector: got True with trainable=False"),
        ({"seed": 0.5}, "seed: got 0.5; expected a whole number"),
        ({"omega": 2}, "omega: 'admin' has no such option"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    subject, _ = sized("bert")
    with pytest.raises(AttoscopeError, match=message):
        attoscope.treat(subject.model, "admin", **options)


def test_some_layers_only() -> None:
    subject, _ = sized("bert")
    treatment = attoscope.treat(subject.model, "admin", layers=(1, 3))
    assert treatment.layers == (4, 6)
    assert "4 of 6 residual additions" in str(treatment)
