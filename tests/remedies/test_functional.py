"""Known values of NeuTRENO's attention, its energies, and where flow and stack end."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attoscope.errors import AttoscopeError
from attoscope.measures.smoothness import family
from attoscope.remedies.functional import (
    fidelity,
    flow_limit,
    laplacian,
    neutreno_attention,
    nonlocal_energy,
    stability_limit,
    stacked_limit,
)

DOUBLE = torch.float64
KERNEL = torch.tensor([[0, 1, 0.5], [1, 0, 0.25], [0.5, 0.25, 0]], dtype=DOUBLE)
SIGNAL = torch.tensor([[1, 0], [0, 1], [2, -1]], dtype=DOUBLE)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, within: float = 1e-12) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=within)


def ratio(x: Tensor) -> float:
    return float(family(x[None], torch.ones(1, len(x), dtype=torch.bool))[1, 0])


# 1 and 2: the layer.


def test_a_layer_of_two_tokens() -> None:
    half = torch.full((2, 2), 0.5, dtype=DOUBLE)
    values = torch.tensor([[0.6, 0.4], [0.4, 0.6]], dtype=DOUBLE)
    expected = torch.tensor([[0.74, 0.26], [0.26, 0.74]], dtype=DOUBLE)
    found = neutreno_attention(half, values, torch.eye(2, dtype=DOUBLE), 0.6)
    assert close(found, expected, 1e-15)


def test_without_strength_or_difference_it_is_attention_to_the_last_bit() -> None:
    weights = gaussian(2, 3, 5, 5).softmax(-1)
    values, first = gaussian(2, 3, 5, 4, seed=1), gaussian(2, 3, 5, 4, seed=2)
    plain = weights @ values
    assert torch.equal(neutreno_attention(weights, values, first, 0.0), plain)
    assert torch.equal(neutreno_attention(weights, values, first, torch.tensor(0.0)), plain)
    assert torch.equal(neutreno_attention(weights, values, values, 0.6), plain)
    assert torch.equal(neutreno_attention(weights, values, None, 0.6), plain)
    overflow = torch.full_like(values, math.inf)
    assert not neutreno_attention(weights, values, overflow, 0.0).isnan().any()


def test_one_strength_per_head_and_gradients_to_the_first_values() -> None:
    weights = gaussian(2, 3, 5, 5).softmax(-1)
    values, first = gaussian(2, 3, 5, 4, seed=1), gaussian(2, 3, 5, 4, seed=2)
    strength = torch.tensor([0.0, 0.4, 0.6], dtype=DOUBLE)[:, None, None]
    first.requires_grad_()
    found = neutreno_attention(weights, values, first, strength)
    for head, each in enumerate((0.0, 0.4, 0.6)):
        alone = neutreno_attention(weights[:, head], values[:, head], first[:, head], each)
        assert close(found[:, head], alone, 1e-15)
    found.sum().backward()
    assert first.grad is not None
    assert torch.equal(first.grad, strength.expand_as(first))


def test_what_does_not_fit_together_is_a_sentence() -> None:
    weights, values = torch.full((3, 3), 1 / 3), torch.ones(3, 2)
    with pytest.raises(AttoscopeError, match=r"first: got shape \(3, 4\)"):
        neutreno_attention(weights, values, torch.ones(3, 4), 0.6)
    with pytest.raises(AttoscopeError, match="1 queries and 3 keys"):
        neutreno_attention(weights[:1], values, values, 0.6)
    with pytest.raises(AttoscopeError, match="weights: got 3 keys"):
        neutreno_attention(weights, torch.ones(4, 2), None, 0.6)


# 3: the stack.


@pytest.mark.parametrize(
    ("strength", "factor"), [(0.2, 1 / 6), (0.4, 2 / 7), (0.6, 3 / 8), (0.9, 9 / 19)]
)
def test_uniform_attention_ends_at_a_known_share(strength: float, factor: float) -> None:
    uniform = torch.full((5, 5), 0.2, dtype=DOUBLE)
    first = gaussian(5, 3)
    limit = stacked_limit(uniform, first, strength)
    assert ratio(limit) / ratio(first) == pytest.approx(factor, abs=1e-12)
    assert close(limit.mean(0), first.mean(0))
    x = first
    for _ in range(400):
        x = neutreno_attention(uniform, x, first, strength)
    assert close(x, limit)


def test_uniform_attention_is_stable_up_to_strength_one() -> None:
    uniform = torch.full((5, 5), 0.2, dtype=DOUBLE)
    assert float(stability_limit(uniform)) == pytest.approx(1.0, abs=1e-12)
    x = first = gaussian(5, 3)
    for _ in range(400):
        x = neutreno_attention(uniform, x, first, 1.1)
    assert x.norm() > 1e10


def test_the_stack_ends_where_one_more_layer_changes_nothing() -> None:
    attention = gaussian(2, 3, 6, 6).softmax(-1)
    first = gaussian(2, 3, 6, 4, seed=1)
    limit = stacked_limit(attention, first, 0.4)
    assert limit.shape == first.shape
    assert close(neutreno_attention(attention, limit, first, 0.4), limit, 1e-13)
    constant = first.mean(-2, keepdim=True).expand_as(first)
    assert close(stacked_limit(attention, constant, 0.4), constant, 1e-13)


def test_stability_limits_that_are_known() -> None:
    symmetric = torch.tensor([[0.25, 0.75], [0.75, 0.25]], dtype=DOUBLE)  # 1 and -0.5
    swap = torch.tensor([[0, 1], [1, 0]], dtype=DOUBLE)  # 1 and -1
    assert float(stability_limit(symmetric)) == pytest.approx(0.5, abs=1e-15)
    assert float(stability_limit(swap)) == pytest.approx(0.0, abs=1e-15)
    assert torch.allclose(
        stability_limit(torch.stack([symmetric, swap])), torch.tensor([0.5, 0.0], dtype=DOUBLE)
    )


def test_causal_attention_is_stable_up_to_its_least_diagonal() -> None:
    causal = torch.ones(40, 40).tril()
    causal /= causal.sum(1, keepdim=True)
    assert float(stability_limit(causal)) == pytest.approx(1 + 1 / 40, abs=1e-6)


def test_complex_eigenvalues_lower_the_limit_below_one_plus_the_real_part() -> None:
    # A circulant: eigenvalues 1 and -0.35 ± 0.5 i up to the choice of its row.
    row = torch.tensor([0.1, 0.45 + 0.25 / 3**0.5 * 2, 0.45 - 0.25 / 3**0.5 * 2], dtype=DOUBLE)
    turning = torch.stack([row.roll(i) for i in range(3)])
    expected = -0.35 + math.sqrt(1 - 0.5**2)
    assert float(stability_limit(turning)) == pytest.approx(expected, abs=1e-14)
    for strength, ends in ((expected - 0.01, True), (expected + 0.01, False)):
        start = gaussian(3, 2)
        x = start
        for _ in range(6000):
            x = neutreno_attention(turning, x, start, strength)
        away = (x - stacked_limit(turning, start, strength)).norm()
        assert bool(away < 1e-6) is ends


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        (torch.ones(2, 3), "2 queries and 3 keys"),
        (torch.ones(2, 2), "rows that sum to 2"),
        (torch.tensor([[1.5, -0.5], [0.5, 0.5]]), "negative"),
        (torch.tensor([[math.nan, 0.5], [0.5, 0.5]]), "not finite"),
    ],
)
def test_what_is_no_attention_has_no_stability_limit(broken: Tensor, match: str) -> None:
    with pytest.raises(AttoscopeError, match=match):
        stability_limit(broken)


def test_a_stack_without_strength_has_no_limit_of_its_own() -> None:
    with pytest.raises(AttoscopeError, match="strength: got 0"):
        stacked_limit(torch.full((2, 2), 0.5), torch.ones(2, 2), 0.0)


# 4 and 5: the flow.


@pytest.mark.parametrize(
    ("strength", "left", "kept"),
    [
        (0.5, [0.9649122807, 0.8421052632, 1.1929824561], 0.1780507292),
        (2.0, [0.9298245614, 0.5789473684, 1.4912280702], 0.4601711245),
        (0.0, [1.0, 1.0, 1.0], 0.0),
    ],
)
def test_where_the_flow_of_three_tokens_ends(
    strength: float, left: list[float], kept: float
) -> None:
    limit = flow_limit(KERNEL, SIGNAL, strength)
    first = torch.tensor(left, dtype=DOUBLE)
    assert close(limit, torch.stack([first, 1 - first], 1), 1e-10)
    assert ratio(limit) / ratio(SIGNAL) == pytest.approx(kept, abs=1e-10)


def test_without_strength_each_connected_part_ends_at_its_own_mean() -> None:
    kernel = torch.zeros(4, 4, dtype=DOUBLE)
    kernel[0, 1] = kernel[1, 0] = kernel[2, 3] = kernel[3, 2] = 1.0
    signal = torch.tensor([[0.0], [2.0], [5.0], [9.0]], dtype=DOUBLE)
    expected = torch.tensor([[1.0], [1.0], [7.0], [7.0]], dtype=DOUBLE)
    assert close(flow_limit(kernel, signal, 0.0), expected)


@pytest.mark.parametrize("strength", [0.0, 1e-6, 0.5])
@pytest.mark.parametrize("own", [1.0, 15.7, 1e6])
def test_what_a_token_weighs_itself_changes_nothing(strength: float, own: float) -> None:
    kernel = gaussian(16, 16).exp() / 100
    kernel = (kernel + kernel.T) / 2
    kernel.fill_diagonal_(0.0)
    signal = gaussian(16, 3, seed=1) + 5.0
    heavy = kernel + own * torch.eye(16, dtype=DOUBLE)
    assert torch.equal(laplacian(heavy), laplacian(kernel))
    assert close(flow_limit(heavy, signal, strength), flow_limit(kernel, signal, strength))
    assert close(flow_limit(heavy, signal, strength).mean(0), signal.mean(0), 1e-9)


def test_without_strength_the_weakest_tie_and_a_chain_of_ties_are_enough() -> None:
    chain = torch.zeros(2, 9, 9, dtype=DOUBLE)
    for i in range(8):
        chain[0, i, i + 1] = 1.0
        chain[1, i + 1, i] = 1e-200
    signal = gaussian(2, 9, 3)
    assert close(flow_limit(chain, signal, 0.0), signal.mean(1, keepdim=True).expand(2, 9, 3))


def test_energy_and_fidelity_by_their_sums() -> None:
    u, f = gaussian(2, 4, 3), gaussian(2, 4, 3, seed=1)
    kernel = gaussian(2, 4, 4, seed=2).exp()
    pairs = (u[:, :, None] - u[:, None]).square().sum(-1)
    assert close(nonlocal_energy(kernel, u), (kernel * pairs).sum((1, 2)) / 2)
    assert close(fidelity(u, f), (u - f).square().sum((1, 2)) / 2)
    assert float(nonlocal_energy(KERNEL, SIGNAL)) == pytest.approx(2 + 1 + 2, abs=1e-14)
    assert float(fidelity(SIGNAL, torch.zeros_like(SIGNAL))) == 3.5


def test_equal_tokens_have_no_energy_however_large() -> None:
    equal = torch.tensor([[1e8, -3e8]], dtype=DOUBLE).expand(3, 2)
    assert float(nonlocal_energy(KERNEL, equal)) == 0.0


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_the_gradient_is_twice_the_laplacian_and_the_pull(strength: float) -> None:
    u = gaussian(3, 2, seed=3).requires_grad_()
    energy = nonlocal_energy(KERNEL, u) + strength * fidelity(u, SIGNAL)
    (found,) = torch.autograd.grad(energy, u)
    expected = 2 * laplacian(KERNEL) @ u + strength * (u - SIGNAL)
    assert close(found, expected, 1e-14)


def test_the_gradient_vanishes_where_the_flow_ends() -> None:
    kernel, f = gaussian(2, 5, 5).exp(), gaussian(2, 5, 3, seed=1)
    u = flow_limit(kernel, f, 0.7).requires_grad_()
    energy = nonlocal_energy(kernel, u) + 0.7 * fidelity(u, f)
    (found,) = torch.autograd.grad(energy.sum(), u)
    assert close(found, torch.zeros_like(f), 1e-13)


def test_a_small_step_down_the_gradient_lowers_the_energy() -> None:
    u = SIGNAL.clone()
    for _ in range(20):
        energy, u = nonlocal_energy(KERNEL, u), u - 0.1 * 2 * laplacian(KERNEL) @ u
        assert nonlocal_energy(KERNEL, u) < energy


def test_shapes_of_flows_that_do_not_fit_are_a_sentence() -> None:
    with pytest.raises(AttoscopeError, match="2 tokens"):
        nonlocal_energy(KERNEL, SIGNAL[:2])
    with pytest.raises(AttoscopeError, match=r"anchor: got shape \(2, 2\)"):
        fidelity(SIGNAL, SIGNAL[:2])
    with pytest.raises(AttoscopeError, match="strength: got -1"):
        flow_limit(KERNEL, SIGNAL, -1.0)


# 6: attention is an Euler step.


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strength", [0.0, 0.6])
def test_attention_is_one_euler_step(symmetric: bool, strength: float) -> None:
    keys, values, anchor = (gaussian(1, 1, 6, 4, seed=i) for i in range(3))
    queries = keys if symmetric else gaussian(1, 1, 6, 4, seed=3)
    kernel = (queries @ keys.mT / 2).exp()
    step = 1 / kernel.sum(-1, keepdim=True)
    pull = (kernel[..., None] * (values[..., :, None, :] - values[..., None, :, :])).sum(-2)
    pull = pull + strength / step * (values - anchor)
    plain = scaled_dot_product_attention(queries, keys, values)
    euler = values - step * pull
    assert close(euler, plain + strength * (anchor - values), 2e-15)
    weights = (queries @ keys.mT / 2).softmax(-1)
    assert close(euler, neutreno_attention(weights, values, anchor, strength), 2e-15)
