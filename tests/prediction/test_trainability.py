"""Reach of one layer's attention: known values, and the readings of live models."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import attoscope
from attoscope import AttoscopeError
from attoscope.prediction.reach import ValuePath, design, lower_bound
from attoscope.prediction.trainability import (
    attention_trainability,
    row_jacobian,
    softmax_floor,
    value_path,
)
from attoscope.remedies.gaussian import gaussian_attention, gaussian_weights
from attoscope.trace import Batch, Subject
from tests.models import HEADS, LAYERS, WIDTH, make
from tests.remedies.treated import data_of, output, sized


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


# Kernels: known values.


def test_equal_value_rows_hold_softmax_at_the_formula() -> None:
    """1/2 (0.36 + 0.01 + 0.16 + 0.16 + 0.04 + 0.64) = 0.685 whatever queries and keys are."""
    v = drawn(4)
    v = v / v.norm()
    scale = torch.tensor([[0.4, 0.9, 1.4], [0.6, 1.2, 1.8]], dtype=torch.float64)
    values, targets = v.expand(2, 3, 4), scale[..., None] * v
    for seed in range(3):
        q = drawn(2, 1, 3, 8, seed=seed).requires_grad_()
        found = nn.functional.scaled_dot_product_attention(q, q, values[:, None])[:, 0]
        loss = (found - targets).square().sum() / 2
        assert float(loss.detach()) == pytest.approx(0.685, abs=1e-14)
        (slope,) = torch.autograd.grad(loss, q)
        assert float(slope.abs().max()) < 1e-15
    for hull in ("affine", "convex"):
        assert softmax_floor(values, targets, hull=hull) == pytest.approx(0.685, abs=1e-14)


def test_the_gaussian_kernel_reaches_those_targets() -> None:
    """Weights of any row sum in (0, 3): here (q - k)^2 is solved for by hand."""
    sums = torch.tensor([0.4, 0.9, 1.4], dtype=torch.float64)
    q = (-2 * 8**0.5 * (sums / 3).log()).sqrt()[:, None] * torch.eye(8)[:1].double()
    found = gaussian_attention(
        q[None, None], torch.zeros(1, 1, 3, 8).double(), torch.ones(1, 1, 3, 1).double()
    )
    torch.testing.assert_close(found.output[0, 0, :, 0], sums)


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_the_jacobian_is_that_of_autograd(kernel: str) -> None:
    logits, values = drawn(4, seed=1), drawn(4, 3, seed=2)
    act = torch.exp if kernel == "gaussian" else (lambda z: z.softmax(0))
    expected = torch.autograd.functional.jacobian(lambda z: act(z) @ values, logits)
    torch.testing.assert_close(row_jacobian(act(logits), values, kernel), expected)


def test_softmax_loses_one_rank_and_the_gaussian_none() -> None:
    for seed in range(5):
        s, v = drawn(4, seed=seed).exp(), drawn(4, 4, seed=seed + 9)
        soft = torch.linalg.svdvals(row_jacobian(s / s.sum(), v))
        full = torch.linalg.svdvals(row_jacobian(s, v, "gaussian"))
        assert soft[3] < 1e-15 < 1e-4 < soft[2]
        assert full[3] > 1e-4
    batch = row_jacobian(drawn(2, 3, 4).softmax(-1), drawn(2, 3, 4, 5))
    assert batch.shape == (2, 3, 5, 4) and int(torch.linalg.matrix_rank(batch).max()) == 3
    with pytest.raises(AttoscopeError, match="kernel: got 'relu'"):
        row_jacobian(drawn(4), drawn(4, 4), "relu")


def test_the_floor_of_identity_values() -> None:
    """1/2 (1.y - 1)^2 / n: for (0.5, 0.5, 0.5) it is 1/2 0.25 / 3 = 0.0416667."""
    values = torch.eye(3, dtype=torch.float64)
    half = torch.full((1, 3), 0.5, dtype=torch.float64)
    for hull in ("affine", "convex"):
        assert softmax_floor(values, half, hull=hull) == pytest.approx(1 / 24, abs=1e-14)
    targets = drawn(6, 3)
    expected = float((targets.sum(-1) - 1).square().sum() / 6)
    assert softmax_floor(values, targets) == pytest.approx(expected, rel=1e-12)
    # Outside the simplex the hull is farther: (2, 0, 0) is at distance 1 of its corner.
    corner = torch.tensor([[2.0, 0, 0]], dtype=torch.float64)
    assert softmax_floor(values, corner, hull="convex") == pytest.approx(0.5)
    assert softmax_floor(values, corner) == pytest.approx(1 / 6)


def test_the_convex_floor_is_the_least_loss_that_logits_reach() -> None:
    values, targets = drawn(2, 4, 3, seed=3), drawn(2, 5, 3, seed=4)
    floor = softmax_floor(values, targets, hull="convex")
    affine = softmax_floor(values, targets)
    logits = torch.zeros(2, 5, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.2)
    for _ in range(1500):
        loss = (logits.softmax(-1) @ values - targets).square().sum() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert affine <= floor <= float(loss.detach())
    assert float(loss.detach()) == pytest.approx(floor, rel=1e-3)


def test_the_floor_is_zero_where_values_span_the_width_and_hold_the_target() -> None:
    values = drawn(5, 3)
    inside = drawn(4, 5, seed=1).softmax(-1) @ values
    for hull in ("affine", "convex"):
        assert softmax_floor(values, inside, hull=hull) < 1e-20
    with pytest.raises(AttoscopeError, match="hull: got 'box'"):
        softmax_floor(values, inside, hull="box")
    with pytest.raises(AttoscopeError, match="expected the same samples and width"):
        softmax_floor(values, inside[:, :2])


def test_kernel_matrices_of_equal_queries_and_keys_are_positive_definite() -> None:
    for seed in range(5):
        q = drawn(1, 1, 6, 4, seed=seed)
        gaussian = gaussian_weights(q, q)[0, 0]
        assert float(torch.linalg.eigvalsh(gaussian).min()) > 1e-6
        assert float(torch.linalg.eigvalsh((q[0, 0] @ q[0, 0].T / 2).exp()).min()) > 1e-6
        assert float(torch.linalg.svdvals((q[0, 0] @ q[0, 0].T / 2).softmax(-1)).min()) > 1e-6
    twice = drawn(1, 1, 3, 4).repeat(1, 1, 2, 1)
    assert float(torch.linalg.eigvalsh(gaussian_weights(twice, twice)[0, 0]).min()) < 1e-12


# The value path.


def test_the_design_is_the_derivative_of_the_outputs() -> None:
    seen, out = drawn(4, 3, 5), drawn(4, 2, 6, seed=1)
    for groups in (4, 2):
        repeat = 4 // groups
        slope = torch.autograd.functional.jacobian(
            lambda w, r=repeat: (seen @ w.repeat_interleave(r, 0) @ out).sum(0),
            drawn(groups, 5, 2, seed=2),
        )
        torch.testing.assert_close(design(seen, out, groups), slope.reshape(18, -1))


def test_the_least_eigenvalue_is_above_the_bound_and_equal_for_orthonormal_outputs() -> None:
    seen = drawn(3, 6, 8)
    for seed in range(4):
        out = drawn(3, 5, 4, seed=seed)
        path = value_path(seen, out)
        bound = path.sigma_min**2 * float(torch.linalg.svdvals(out)[:, -1].min()) ** 2
        assert path.exact and path.mu >= bound * (1 - 1e-9) > 0
        assert lower_bound(seen, out) <= path.mu * (1 + 1e-9)
        matrix = design(seen, out)
        values = torch.linalg.eigvalsh(matrix @ matrix.T)
        assert path.mu == pytest.approx(float(values[0]), rel=1e-6)
        assert path.largest == pytest.approx(float(values[-1]), rel=1e-9)
    level = torch.linalg.qr(drawn(3, 5, 4))[0]
    path = value_path(seen, level)
    assert path.mu == pytest.approx(path.sigma_min**2, rel=1e-9)
    assert path.rate == pytest.approx(path.free_rate, rel=1e-9)


def test_the_second_bound_holds_where_heads_are_narrower_than_the_output() -> None:
    seen, out = drawn(4, 6, 8), drawn(4, 2, 7, seed=1)
    exact = value_path(seen, out).mu
    own = min(float(torch.linalg.svdvals(each)[-1]) for each in seen)
    expected = (own * float(torch.linalg.svdvals(out.flatten(0, 1))[-1])) ** 2
    assert lower_bound(seen, out) == pytest.approx(expected, rel=1e-9)
    assert 0 < expected <= exact
    assert lower_bound(drawn(4, 9, 8), out) == 0  # more rows than the width


def test_large_problems_get_bounds_from_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    for seen, out, groups in (
        (drawn(3, 6, 8), drawn(3, 5, 4, seed=1), 3),
        (drawn(4, 6, 8), drawn(4, 2, 7, seed=1), 4),
        (drawn(4, 6, 8), drawn(4, 2, 3, seed=1), 2),
    ):
        exact = value_path(seen, out, groups=groups)
        with monkeypatch.context() as patch:
            patch.setattr("attoscope.prediction.reach.DENSE", 0)
            found = value_path(seen, out, groups=groups)
        assert not found.exact and found.mu <= exact.mu * (1 + 1e-9)
        assert found.largest >= exact.largest * (1 - 1e-9)
        assert found.mu > 0 or groups < len(seen)
        assert found.rank == exact.rank and found.sigma_min == exact.sigma_min


def test_fewer_features_than_rows_leave_a_floor() -> None:
    """rank B <= HD < Nn, and the optimum is 1/2 |(I - J J^+) y|^2."""
    seen, out, target = drawn(1, 12, 6), drawn(1, 6, 3, seed=1), drawn(36, seed=2)
    path = value_path(seen, out)
    assert not path.wide_enough and path.rank == 6 and path.mu == path.sigma_min == 0
    matrix = design(seen, out)
    left = target - matrix @ torch.linalg.pinv(matrix, rtol=1e-12) @ target
    best = torch.linalg.lstsq(matrix, target, driver="gelsd").solution
    assert float(left.square().sum() / 2) > 1
    torch.testing.assert_close(matrix @ best, target - left)


def test_the_loss_falls_by_the_rate_in_every_step() -> None:
    seen, out, target = drawn(2, 6, 8), drawn(2, 4, 3, seed=1), drawn(18, seed=2)
    path, matrix = value_path(seen, out), design(seen, out)
    left = -target
    for _ in range(200):
        before = left.square().sum()
        left = left - matrix @ (matrix.T @ left) / path.largest
        assert left.square().sum() <= (1 - path.rate) * before * (1 + 1e-12)
    assert path.rate > 1e-4


# Live models.


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "llama", "vit", "encoder_time_first", "albert"]
)
def test_every_layer_of_a_model_is_read(name: str) -> None:
    subject, batch = sized(name)
    before = output(subject, batch)
    found = attention_trainability(subject, batch)
    assert torch.equal(output(subject, batch), before)
    assert len(found.layers) == LAYERS
    for layer in found.layers:
        assert layer.path.features == HEADS * WIDTH and layer.path.rows == found.tokens
        assert layer.path.rank == min(found.tokens, HEADS * WIDTH) - layer.repeated
        assert layer.trapped == 0 and layer.dead < 0.2
        assert layer.gaussian_least is not None and layer.gaussian_least > 0
    assert "HD >= Nn holds in 3 of 3" in str(found) and "dead zones of its own" in str(found)


def test_the_rows_are_the_attended_inputs_of_the_first_layer() -> None:
    """By hand: attention of the plain model times what its value projection reads."""
    subject, batch = sized("bert")
    inputs = []
    own = subject.model.encoder.layer[0].attention.self
    hook = own.value.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    with torch.no_grad():
        subject.model.config._attn_implementation = "eager"
        maps = subject.model(**batch.inputs, output_attentions=True).attentions[0]
    hook.remove()
    seen = (maps.double() @ inputs[0].double()[:, None]).transpose(0, 1)
    rows = seen[:, batch.valid]
    out = subject.model.encoder.layer[0].attention.output.dense.weight.detach().T
    expected = value_path(rows, out.double().reshape(HEADS, -1, WIDTH), precision=1.2e-7)
    path = attention_trainability(subject, batch).layers[0].path
    assert path.rows == int(batch.valid.sum()) == expected.rows
    assert path.sigma_min == pytest.approx(expected.sigma_min, rel=1e-3)
    assert path.sigma_max == pytest.approx(expected.sigma_max, rel=1e-4)
    assert path.rank == expected.rank


def test_padding_and_rows_beyond_those_asked_for_are_left_out() -> None:
    subject, batch = sized("bert")
    found = attention_trainability(subject, batch, rows=13)
    assert found.tokens == 13 and found.available == int(batch.valid.sum())
    assert "13 of 29 tokens" in str(found)
    with pytest.raises(AttoscopeError, match="rows: got 0"):
        attention_trainability(subject, batch, rows=0)


def test_more_tokens_than_features_cannot_be_fitted() -> None:
    subject, _ = sized("encoder")
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(13, 11, WIDTH, generator=generator)
    found = attention_trainability(subject, Batch({"src": floats}, tuple(range(13))))
    (layer, *_) = found.layers
    assert layer.path.rows == 143 > HEADS * WIDTH
    assert not layer.path.wide_enough and layer.path.rank == HEADS * WIDTH
    assert math.isinf(layer.steps) and "HD < Nn in 3 layers" in str(found)
    assert "no rate can hold for every target" in str(found)


def test_equal_values_one_hot_rows_and_repeated_documents_are_found() -> None:
    subject, batch = sized("bert")
    first, second, third = subject.model.encoder.layer
    nn.init.zeros_(first.attention.self.value.weight)
    nn.init.ones_(first.attention.self.value.bias)
    second.attention.self.query.weight.data *= 1e4
    found = attention_trainability(subject, batch)
    assert [layer.trapped for layer in found.layers] == [1.0, 0.0, 0.0]
    assert found.layers[0].missed == 1.0
    assert found.layers[1].dead > 0.9 and found.layers[2].dead < 0.2
    assert found.layers[1].gaussian_dead is not None and found.layers[1].gaussian_dead > 0.9
    twice = {k: v[:1].repeat(2, 1) for k, v in batch.inputs.items()}
    found = attention_trainability(subject, Batch(twice, (0, 1), torch.ones(2, 11).bool()))
    assert found.layers[2].repeated == 11 and found.layers[2].path.rank <= 11
    assert "repeat an earlier one" in str(found)


def test_short_documents_leave_directions_that_softmax_misses() -> None:
    """Three tokens span two directions of a head's eight."""
    subject, _ = sized("vit")
    subject, batch = sized("encoder")
    short = {"src": batch.inputs["src"][:, :3]}
    found = attention_trainability(subject, Batch(short, (0, 1, 2)))
    assert all(layer.missed == pytest.approx(0.75) for layer in found.layers)


@pytest.mark.parametrize("name", ["bert", "llama", "encoder", "encoder_time_first"])
def test_a_model_with_the_gaussian_kernel_is_read_as_well(name: str) -> None:
    subject, batch = sized(name)
    plain = attention_trainability(subject, batch)
    attoscope.treat(subject.model, "gaussian", data_of(subject, batch))
    found = attention_trainability(subject, batch)
    assert [layer.kernel for layer in found.layers] == ["Gaussian"] * LAYERS
    assert [layer.name for layer in found.layers] == [layer.name for layer in plain.layers]
    first, before = found.layers[0], plain.layers[0]
    # The first layer has the same queries and keys under both kernels.
    assert first.gaussian_least == pytest.approx(before.gaussian_least, rel=1e-3)
    assert first.dead == before.gaussian_dead
    assert first.path.sigma_max != pytest.approx(before.path.sigma_max, rel=1e-2)
    assert first.missed == before.missed


def test_half_precision_is_taken_as_it_is() -> None:
    subject, batch = sized("llama")
    plain = attention_trainability(subject, batch).layers[0]
    subject.model.bfloat16()
    found = attention_trainability(subject, batch).layers[0]
    assert found.path.rank == plain.path.rank and found.missed == plain.missed
    assert found.path.sigma_max == pytest.approx(plain.path.sigma_max, rel=0.05)


def test_what_has_no_plain_projections_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(nn.functional.scaled_dot_product_attention(x, x, x))
            return x

    with pytest.raises(AttoscopeError, match="no linear map gives this attention's values"):
        attention_trainability(Subject.of(Bare()), torch.randn(2, 5, 8))


def test_the_words_do_not_promise() -> None:
    path = ValuePath(8, 96, 8, 1e-4, 1.0, 0.0, 1.0, True)
    assert path.wide_enough and path.free_rate == pytest.approx(1e-8)
    subject, batch = make("bert")
    text = str(attention_trainability(subject, batch))
    assert (
        "a condition, not a promise" in text and "the guarantee is useless all the same" in text
    )
