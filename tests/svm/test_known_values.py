"""Values known in closed form (arXiv 2308.16898 and the papers that follow it)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attoscope.svm import (
    AttentionSVM,
    Entrywise,
    InfeasibleSelection,
    Selection,
    cover_count,
    finite_part,
)

ROOT2 = math.sqrt(2.0)


def fit(tokens, queries, selected=None, norm="frobenius", **options):
    selected = np.zeros(len(queries), int) if selected is None else selected
    return AttentionSVM(norm, tol=1e-10, **options).fit_selection(
        Selection.cross(tokens, queries, selected)
    )


def pair(theta: float):
    """Two sequences whose Frobenius and nuclear solutions differ by the angle of the queries."""
    tokens = [[[1, 0], [0, 0]], [[0, 1], [0, 0]]]
    return tokens, [[1, 0], [math.cos(theta), math.sin(theta)]]


@pytest.mark.parametrize("norm", ["frobenius", "nuclear", "spectral"])
def test_k1_one_constraint(norm: str) -> None:
    model = fit([[[3, 1], [1, 0]]], [[0, 2]], norm=norm)
    assert model.objective_ == pytest.approx(1 / (2 * math.sqrt(5)), rel=1e-9)
    np.testing.assert_allclose(model.weight_, [[0, 0.2], [0, 0.1]], atol=1e-8)


@pytest.mark.parametrize(
    ("norm", "value", "column"),
    [
        ("max", 1 / 6, None),
        ("l1", 1 / 4, None),
        (Entrywise(1.5), 0.2403749, (2 / 9, 1 / 18)),
        (Entrywise(3), 0.2043101, (0.1846990, 0.1306019)),
    ],
)
def test_k1_entrywise(norm, value: float, column) -> None:
    model = fit([[[3, 1], [1, 0]]], [[0, 2]], norm=norm)
    assert model.objective_ == pytest.approx(value, abs=1e-7)
    assert model.lower_bound_ <= value * (1 + 1e-6)
    if column is not None:
        np.testing.assert_allclose(model.weight_[:, 1], column, atol=1e-6)
        np.testing.assert_allclose(model.weight_[:, 0], 0, atol=1e-8)


def test_k2_one_dimension_and_a_slack_token() -> None:
    model = fit([[[2], [1]], [[0], [4]]], [[1], [-0.5]])
    np.testing.assert_allclose(model.weight_, [[1]], atol=1e-10)
    np.testing.assert_allclose(model.dual_.toarray(), [[0, 1], [0, 0]], atol=1e-9)
    assert model.support_.tolist() == [[0, 1]]


@pytest.mark.parametrize("tokens", [2, 4, 9])
def test_k3_orthonormal_tokens(tokens: int) -> None:
    z = np.eye(tokens)[1]
    model = fit([np.eye(tokens)], [z])
    u = np.full(tokens, -1 / tokens)
    u[0] = (tokens - 1) / tokens
    np.testing.assert_allclose(model.weight_, np.outer(u, z), atol=1e-10)
    assert model.objective_ == pytest.approx(math.sqrt((tokens - 1) / tokens), rel=1e-10)
    np.testing.assert_allclose(model.dual_.toarray()[0, 1:], 1 / tokens, atol=1e-9)
    assert len(model.support_) == tokens - 1


def test_k4_slack_and_degenerate_tokens() -> None:
    model = fit([[[0, 0], [-1, 0], [-2, -1], [0, -1]]], [[1, 0]])
    np.testing.assert_allclose(model.weight_, [[1, 0], [1, 0]], atol=1e-9)
    np.testing.assert_allclose(model.dual_.toarray(), [[0, 1, 0, 1]], atol=1e-8)
    margins = model.selection_.margins(model.weight_)
    np.testing.assert_allclose(margins, [[0, 1, 3, 1]], atol=1e-8)
    tight = fit([[[0, 0], [-1, 0], [-1, -2]]], [[1, 0]])
    np.testing.assert_allclose(tight.weight_, [[1, 0], [0, 0]], atol=1e-8)
    assert len(tight.support_) == 2
    np.testing.assert_allclose(tight.dual_.toarray(), [[0, 1, 0]], atol=1e-8)


@pytest.mark.parametrize(
    ("norm", "value"), [("frobenius", 1 / ROOT2), ("max", 0.5), ("l1", 1.0)]
)
def test_k5_self_attention(norm: str, value: float) -> None:
    selection = Selection.self_attention([np.eye(2)], [0])
    model = AttentionSVM(norm, tol=1e-10).fit_selection(selection)
    assert model.objective_ == pytest.approx(value, rel=1e-8)
    if norm == "frobenius":
        np.testing.assert_allclose(model.weight_, [[0.5, 0], [-0.5, 0]], atol=1e-9)


@pytest.mark.parametrize(
    ("tokens", "queries", "selected"),
    [
        ([[[0, 0], [1, 0], [-1, 0]]], [[1, 0]], [0]),
        ([[[1, 0], [0, 0]], [[0, 0], [1, 0]]], [[1, 0], [1, 0]], [0, 0]),
        ([[[0.0], [-1.0], [2.0]]], [[1.0]], [0]),
    ],
)
def test_k6_infeasible_with_a_proof(tokens, queries, selected) -> None:
    with pytest.raises(InfeasibleSelection, match="no weight selects") as caught:
        fit(tokens, queries, selected)
    assert caught.value.verify()
    dual = caught.value.certificate.dual.toarray()
    assert dual.sum() == pytest.approx(1)
    if len(tokens) == 2 or tokens[0][1] == [1, 0]:
        np.testing.assert_allclose(dual[dual > 0], [0.5, 0.5], atol=1e-8)


@pytest.mark.parametrize("degrees", [20, 60, 85])
def test_k7_frobenius_and_nuclear_differ(degrees: float) -> None:
    theta = math.radians(degrees)
    fro = fit(*pair(theta))
    np.testing.assert_allclose(
        fro.weight_, [[1, 0], [math.cos(theta), math.sin(theta)]], atol=1e-8
    )
    assert fro.objective_ == pytest.approx(ROOT2, rel=1e-9)
    np.testing.assert_allclose(fro.dual_.toarray()[:, 1], [1, 1], atol=1e-7)
    assert fro.rank_ == 2
    nuclear = fit(*pair(theta), norm="nuclear")
    t = math.tan(theta / 2)
    assert nuclear.objective_ == pytest.approx(ROOT2 / math.cos(theta / 2), rel=1e-8)
    np.testing.assert_allclose(nuclear.weight_, [[1, t], [1, t]], atol=1e-6)
    assert nuclear.rank_ == 1
    np.testing.assert_allclose(
        nuclear.dual_.toarray()[:, 1], 1 / math.sqrt(1 + math.cos(theta)), atol=1e-5
    )
    spectral = fit(*pair(theta), norm="spectral")
    assert spectral.objective_ == pytest.approx(math.sqrt(2 / (1 + math.sin(theta))), rel=1e-8)


def test_k7_at_sixty_degrees() -> None:
    data = pair(math.radians(60))
    values = {"frobenius": ROOT2, "nuclear": 1.6329932, "spectral": 1.0352762,
              "l1": 2.1547005, "max": 1.0}  # fmt: skip
    for norm, value in values.items():
        assert fit(*data, norm=norm).objective_ == pytest.approx(value, abs=1e-7), norm
    fro, nuc = fit(*data).weight_, fit(*data, norm="nuclear").weight_
    assert np.linalg.svd(fro)[1].sum() == pytest.approx(1.9318517, abs=1e-7)
    correlation = np.vdot(fro, nuc) / np.linalg.norm(fro) / np.linalg.norm(nuc)
    assert correlation == pytest.approx(0.8660254, abs=1e-6)


def test_k8_right_angle_is_not_unique() -> None:
    fro = fit(*pair(math.pi / 2))
    np.testing.assert_allclose(fro.weight_, np.eye(2), atol=1e-9)
    nuclear = fit(*pair(math.pi / 2), norm="nuclear")
    assert nuclear.objective_ == pytest.approx(2.0, rel=1e-9)
    w = nuclear.weight_
    assert w[0, 0] == pytest.approx(1, abs=1e-6) and w[1, 1] == pytest.approx(1, abs=1e-6)
    assert w[0, 1] == pytest.approx(w[1, 0], abs=1e-5) and abs(w[0, 1]) <= 1 + 1e-6


@pytest.mark.parametrize("norm", ["frobenius", "nuclear"])
def test_k9_correlated_pair(norm: str) -> None:
    tokens = [[[1, 0], [0, 0]], [[0.5, math.sqrt(3) / 2], [0, 0]]]
    model = fit(tokens, [[1, 0], [1, 0]], norm=norm)
    np.testing.assert_allclose(model.weight_, [[1, 0], [1 / math.sqrt(3), 0]], atol=1e-7)
    assert model.objective_**2 == pytest.approx(4 / 3, rel=1e-8)
    if norm == "frobenius":
        np.testing.assert_allclose(model.dual_.toarray()[:, 1], [2 / 3, 2 / 3], atol=1e-8)


@pytest.mark.parametrize(
    ("norm", "value"),
    [("frobenius", math.sqrt(4 / 3)), ("nuclear", 1.6329932), ("spectral", math.sqrt(2 / 3))],
)
def test_k10_orthonormal_blocks(norm: str, value: float) -> None:
    tokens = np.eye(6).reshape(2, 3, 6)
    model = fit(tokens, tokens[:, 0], norm=norm)
    assert model.objective_ == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize(("kept", "masked"), [(2, 1), (3, 4), (1, 5)])
def test_k11_several_chosen_tokens(kept: int, masked: int) -> None:
    size = kept + masked
    z = np.eye(size)[0]
    selected = (np.arange(size) < kept)[None]
    selection = Selection.cross([np.eye(size)], [z], selected)
    model = AttentionSVM(tol=1e-10).fit_selection(selection)
    u = np.where(selected[0], masked / size, -kept / size)
    # The published values are for a margin of 1 between every kept and every masked token.
    np.testing.assert_allclose(model.weight_, np.outer(u, z), atol=1e-8)
    assert model.objective_**2 == pytest.approx(kept * masked / size, rel=1e-8)


def test_k11_finite_part() -> None:
    selection = Selection.cross([np.eye(3)], [[1, 0, 0]], [[True, True, False]])
    fin = finite_part(selection, np.array([[2 / 3, 1 / 3, 0]]))
    np.testing.assert_allclose(fin[:, 0], [math.log(2) / 2, -math.log(2) / 2, 0], atol=1e-12)
    mm = AttentionSVM(tol=1e-10).fit_selection(selection).weight_
    np.testing.assert_allclose(mm[:, 0], [1 / 3, 1 / 3, -2 / 3], atol=1e-9)
    assert np.vdot(fin, mm) == pytest.approx(0, abs=1e-9)
    # The same through the general route: log-probabilities as biases, and nothing else to keep.
    scores = selection.scores(fin)[0]
    assert np.exp(scores[0] - scores[1]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("which", "fro", "value", "nuclear", "correlation"),
    [
        ("vis1", [[2.853691, -2.702942], [5.371239, 5.580532]], 8.685735, 9.754810, 0.890405),
        ("vis2", [[0.792552, -1.086473], [-0.633028, -0.347115]], 1.526360, 1.872604, 0.936236),
    ],
)
def test_k13_published_instances(which, fro, value, nuclear, correlation) -> None:
    tokens, queries, chosen = official(which)
    model = fit(tokens, queries, chosen)
    assert model.objective_ == pytest.approx(value, abs=2e-6)
    np.testing.assert_allclose(model.weight_, fro, atol=2e-6)
    low = fit(tokens, queries, chosen, norm="nuclear")
    assert low.objective_ == pytest.approx(nuclear, abs=2e-6)
    both = np.vdot(low.weight_, model.weight_)
    both /= np.linalg.norm(low.weight_) * np.linalg.norm(model.weight_)
    assert both == pytest.approx(correlation, abs=2e-6)
    if which == "vis1":
        assert low.rank_ == 1
        np.testing.assert_allclose(
            low.weight_, [[0.486706, 0.469257], [7.005539, 6.754380]], atol=1e-5
        )
    else:
        values = np.linalg.svd(low.weight_, compute_uv=False)
        np.testing.assert_allclose(values, [1.60905, 0.26355], atol=2e-5)


def official(which: str):
    """The two-dimensional instances of the official notebooks: the order of draws matters."""
    import torch

    generator = torch.Generator().manual_seed(1 if which == "vis1" else 3)
    size = 3 if which == "vis1" else 5
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    v = draw(2)
    v = v / v.norm()
    if which == "vis1":
        x = 0.3 * draw(2, size, 2)
        x[0] += torch.tensor([-1.0, 0.0])
        x[1] += torch.tensor([1.0, 0.0])
    else:
        x = 0.5 * draw(2, size, 2)
        x[0, 0] = torch.tensor([1, 0.5])
        x[1, 0] = torch.tensor([1, -0.5])
        x[:, 1:] += torch.tensor([-1.0, 0.0])
    z = draw(2, 2)
    z = z / z.norm(dim=1, keepdim=True)
    chosen = [0, 2] if which == "vis1" else [0, 0]
    return x.double().numpy(), z.double().numpy(), np.array(chosen)


def test_k15_a_separating_direction_selects_what_the_head_wants() -> None:
    rng = np.random.default_rng(0)
    tokens, queries = rng.standard_normal((5, 30, 3)), rng.standard_normal((5, 3))
    v, c = rng.standard_normal(3), rng.standard_normal(3)
    labels = np.sign(queries @ c)
    chosen = (labels[:, None] * (tokens @ v)).argmax(1)
    selection = Selection.cross(tokens, queries, chosen)
    weight = np.outer(v, c)
    margins = selection.margins(weight)
    assert margins[~selection.selected].min() > 0
    model = AttentionSVM(tol=1e-8).fit_selection(selection)
    assert model.objective_ <= np.linalg.norm(weight) / margins[~selection.selected].min()
    assert cover_count(5, 2) == 0.3125


def test_k16_wide_data() -> None:
    rng = np.random.default_rng(0)
    tokens, queries = rng.standard_normal((8, 12, 768)), rng.standard_normal((8, 768))
    model = fit(tokens, queries)
    square = model.objective_**2
    assert model.dual_.sum() == pytest.approx(square, rel=1e-8)
    assert model.gap_ <= 1e-10 and model.rank_ <= 8
