"""Watching a torch layer that somebody else trains."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from attoscope.dynamics import LayerMonitor, Normalised, correlation, head_weight, train
from attoscope.errors import AttoscopeError
from attoscope.svm import AttentionSVM
from tests.dynamics.build import angle, unit_sphere


class Separate(nn.Module):
    """Attention with its own projections, two query heads to a key head."""

    def __init__(self, width: int = 8, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width // heads * groups)

    def logits(self, x, head: int):
        size = self.q_proj.out_features // self.num_heads
        q = self.q_proj(x).unflatten(-1, (self.num_heads, size))[:, :, head]
        k = self.k_proj(x).unflatten(-1, (-1, size))[:, :, head // 2]
        return q @ k.transpose(1, 2) / size**0.5


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("kind", ["packed", "separate widths", "without bias"])
def test_weight_of_multihead_attention(kind: str) -> None:
    options = (
        {"kdim": 5, "vdim": 5} if kind == "separate widths" else {"bias": kind == "packed"}
    )
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **options)
    if layer.in_proj_bias is not None:
        nn.init.normal_(layer.in_proj_bias)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    memory = torch.randn(3, 6, 5, dtype=torch.float64) if kind == "separate widths" else x
    _, attention = layer(x, memory, memory, average_attn_weights=False)
    for head in range(2):
        w = head_weight(layer, head)
        z = x.numpy()
        if w.shape[1] == 9:
            z = np.concatenate([z, np.ones((3, 6, 1))], 2)
        found = softmax(np.einsum("std,de,sqe->sqt", memory.numpy(), w, z))
        np.testing.assert_allclose(found, attention[:, head].detach().numpy(), atol=1e-14)


def test_weight_of_grouped_heads() -> None:
    layer = Separate().double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    z = np.concatenate([x.numpy(), np.ones((2, 5, 1))], 2)
    for head in range(4):
        found = softmax(np.einsum("std,de,sqe->sqt", x.numpy(), head_weight(layer, head), z))
        want = softmax(layer.logits(x, head).detach().numpy())
        np.testing.assert_allclose(found, want, atol=1e-14)


def test_looks_agree_with_the_solver() -> None:
    """The monitor of a run that `train` made, and a layer that never moves."""
    data = unit_sphere([0], 3, 4, 6)
    run = train(data, Normalised(), 2000, record=[0, 100, 2000])
    now = {}
    monitor = LayerMonitor(lambda: now["w"], data.tokens[0], data.queries[0], every=1, tol=1e-8)
    for w in run.weights[1:, 0]:
        now["w"] = torch.tensor(w)
        assert monitor.step() is monitor.looks[-1]
    last = monitor.looks[-1]
    np.testing.assert_array_equal(last.selected, run.selected()[0])
    for norm in ("frobenius", "nuclear"):
        svm = AttentionSVM(norm, tol=1e-8).fit_selection(run.selection(0))
        assert last.correlation[norm] == pytest.approx(
            correlation(run.weight[0], svm.weight_), abs=1e-4
        )
    lower, upper = run.certificate()
    share = last.margin_share["frobenius"]
    assert share == pytest.approx(svm_value(run) / upper[-1, 0], rel=1e-6)
    assert 0.9 < share <= 1 + 1e-8 and last.correlation["frobenius"] > 0.99
    assert monitor.looks[0].correlation["frobenius"] < last.correlation["frobenius"]
    assert last.max_probability == pytest.approx(run.probabilities().max(2).mean(), abs=1e-12)
    assert last.inside == pytest.approx(1.0, abs=1e-9) and last.feasible


def svm_value(run) -> float:
    return AttentionSVM(tol=1e-8).fit_selection(run.selection(0)).objective_


def test_layer_in_training_turns_towards_its_svm() -> None:
    """Factors of float32, trained by torch on the two-norm pair (K7)."""
    data = angle(60)
    x, z = (torch.tensor(a[0], dtype=torch.float32) for a in (data.tokens, data.queries))
    v = torch.tensor(data.head.v[0], dtype=torch.float32)
    k, q = (nn.Parameter(0.1 * torch.randn(2, 2)) for _ in range(2))
    monitor = LayerMonitor(lambda: (k, q), x, lambda: z, every=100)
    monitor.look()
    for _ in range(300):
        logits = torch.einsum("ntd,dm,em,ne->nt", x, k, q, z)
        loss = nn.functional.softplus(-(logits.softmax(1) @ x @ v).diagonal()).mean()
        grads = torch.autograd.grad(loss, [k, q])
        with torch.no_grad():
            for p, g in zip((k, q), grads, strict=True):
                p -= 0.05 * g / (g.norm() + 1e-30)
        monitor.step()
    rows = monitor.rows()
    assert [row["step"] for row in rows] == [0, 100, 200, 300]
    # Single precision saturates before the end: cos 30 degrees = .866 would be exact.
    assert rows[-1]["correlation_nuclear"] > 0.99
    assert rows[-1]["correlation_frobenius"] < 0.92
    assert all(isinstance(v, int | float | bool) for row in rows for v in row.values())


def test_part_that_probes_cannot_see() -> None:
    """A weight outside the span of key differences and queries changes no margin."""
    keys = np.zeros((1, 2, 3))
    keys[0, 0, 0] = 1.0
    weight = np.array([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    look = LayerMonitor(lambda: weight, keys, [[1.0, 0.0]]).look()
    assert look.norm == 5.0 and look.inside == pytest.approx(0.6)
    assert look.correlation["frobenius"] == pytest.approx(1.0)
    assert look.margin_share["frobenius"] == pytest.approx(1.0)


def test_changes_of_selection_duplicates_and_masks() -> None:
    keys = np.array([[[1.0], [1.0], [0.0], [-5.0]]])
    allowed = np.array([[True, True, True, False]])
    now = {"w": np.ones((1, 1))}
    monitor = LayerMonitor(lambda: now["w"], keys, [[1.0]], allowed=allowed)
    first = monitor.look()
    assert (first.selected.item(), first.duplicates, first.changed) == (0, 1, 0)
    now["w"] = -now["w"]
    second = monitor.look()
    assert (second.selected.item(), second.duplicates, second.changed) == (2, 0, 1)


def test_middle_token_of_three_cannot_win_by_itself() -> None:
    """A zero weight ties all scores: the first token is taken, and no weight may select it."""
    keys = np.array([[[0.0], [1.0], [-1.0]]])
    look = LayerMonitor(lambda: np.zeros((1, 1)), keys, [[1.0]]).look()
    assert not look.feasible
    assert np.isnan(look.correlation["frobenius"]) and np.isnan(look.inside)


def test_errors() -> None:
    keys, queries = np.ones((1, 2, 3)), np.ones((1, 3))
    with pytest.raises(AttoscopeError, match="weight: got ndarray; expected a function"):
        LayerMonitor(np.ones((3, 3)), keys, queries)
    with pytest.raises(AttoscopeError, match="every: got 0"):
        LayerMonitor(lambda: np.ones((3, 3)), keys, queries, every=0)
    with pytest.raises(AttoscopeError, match="weight: got shape"):
        LayerMonitor(lambda: np.ones((2, 3)), keys, queries).look()
    with pytest.raises(AttoscopeError, match="keys: got keys of shape"):
        LayerMonitor(lambda: np.ones((3, 3)), keys[0], queries).look()
    with pytest.raises(AttoscopeError, match="layer: got a Linear without query and key"):
        head_weight(nn.Linear(2, 2))
    with pytest.raises(AttoscopeError, match="head: got 2; expected 0 to 1"):
        head_weight(nn.MultiheadAttention(4, 2), 2)
    lone = Separate()
    del lone.num_heads
    with pytest.raises(AttoscopeError, match="heads: got None for a query projection to 8"):
        head_weight(lone)
    assert head_weight(lone, 3, heads=4).shape == (8, 9)


@pytest.mark.parametrize("tokens", [1, 4])
def test_looks_where_no_key_competes_are_rows(tokens: int) -> None:
    """One key, or equal keys: nothing to select, and the training that is watched goes on."""
    look = LayerMonitor(lambda: np.eye(3), np.ones((2, tokens, 3)), np.ones((2, 3))).look()
    assert not look.feasible and look.duplicates == 2 * (tokens - 1)
    assert look.max_probability == pytest.approx(1 / tokens)
    assert look.norm == pytest.approx(3**0.5) and look.inside == 0.0
    assert all(np.isnan(v) for v in (*look.correlation.values(), *look.gap.values()))


def test_weight_that_is_not_finite_is_a_row_of_nan() -> None:
    keys = np.random.default_rng(0).normal(size=(2, 4, 3))
    now = {"w": np.full((3, 3), np.nan)}
    monitor = LayerMonitor(lambda: now["w"], keys, keys[:, 0])
    look = monitor.look()
    assert not look.feasible and (look.selected == -1).all()
    assert all(np.isnan(v) for v in (look.max_probability, look.norm, look.inside))
    assert all(np.isnan(v) for v in look.margin_share.values())
    now["w"] = np.eye(3)
    assert monitor.look().max_probability > 0.25
    # Probes that are given as they are do not break in training: those are refused.
    with pytest.raises(AttoscopeError, match="keys: got 24 values that are NaN"):
        LayerMonitor(lambda: np.eye(3), keys * np.nan, keys[:, 0]).look()


def test_options_of_the_monitor() -> None:
    keys, queries = np.ones((1, 2, 3)), np.ones((1, 3))
    one = LayerMonitor(lambda: np.eye(3), keys, queries, norms="nuclear")
    assert list(one.look().gap) == ["nuclear"]
    for every in ("x", None, 1.5, True):
        with pytest.raises(AttoscopeError, match="every: got .* whole number"):
            LayerMonitor(lambda: np.eye(3), keys, queries, every=every)
    with pytest.raises(AttoscopeError, match="allowed: got query 0 with no key allowed"):
        LayerMonitor(lambda: np.eye(3), keys, queries, allowed=np.zeros((1, 2), bool))


def test_layers_without_one_weight_are_refused() -> None:
    with pytest.raises(AttoscopeError, match="head: got 0.5; expected 0 to 3"):
        head_weight(Separate(), 0.5)
    odd = Separate()
    odd.k_proj = nn.Linear(8, 3)
    with pytest.raises(
        AttoscopeError, match="key projection to 3 and 4 query heads of width 2"
    ):
        head_weight(odd)
    odd.k_proj = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(AttoscopeError, match="got a Sequential as k_proj; expected a linear"):
        head_weight(odd)
    turned = Separate()
    turned.rotary_emb = nn.Identity()
    with pytest.raises(AttoscopeError, match="Separate with rotary positions"):
        head_weight(turned)
    told = Separate()
    told.config = SimpleNamespace(rope_parameters={"rope_theta": 1e4})
    with pytest.raises(AttoscopeError, match="Separate with rotary positions"):
        head_weight(told)
    told.config = SimpleNamespace(rope_parameters=None)
    assert head_weight(told).shape == (8, 9)
