"""Attention is a step down a functional, and where the flow down that functional ends."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.neutreno._draws import frequency_ratio, normal, seeds
from attoscope.papers.neutreno._paper import PAPER
from attoscope.remedies.functional import fidelity, flow_limit, laplacian, nonlocal_energy

Array = NDArray[np.float64]
TOKENS, WIDTH = 16, 8
STRENGTHS = (0.0, 0.4, 0.6)
EXACT = 1e-14
NEAR = 1e-9
CONSTANT = "0.6, constant anchor"


def euler_step(
    kernel: Tensor, values: Tensor, anchor: Tensor, strength: float, step: Tensor
) -> Tensor:
    """`v_i - step_i (sum_j K_ij (v_i - v_j) + strength / step_i (v_i - f_i))`, by its sums."""
    differences = values[:, None] - values[None]
    slope = (kernel[..., None] * differences).sum(1) + strength / step * (values - anchor)
    return values - step * slope


def step_errors(item: dict[str, Any]) -> dict[str, float]:
    """Largest difference of one Euler step and NeuTRENO's layer on attention by torch."""
    rng = np.random.default_rng(item["seed"])
    keys, queries, values, anchor = normal(rng, 4, TOKENS, WIDTH)
    queries = keys if item["symmetric"] else queries
    kernel = (queries @ keys.T / WIDTH**0.5).exp()
    own = 1 / kernel.sum(1, keepdim=True)
    attention = scaled_dot_product_attention(queries[None], keys[None], values[None])[0]
    layer = attention + item["strength"] * (anchor - values)
    errors = {}
    for name, step in (("own", own), ("common", own.mean().expand_as(own))):
        euler = euler_step(kernel, values, anchor, item["strength"], step)
        errors[name] = float((euler - layer).abs().max())
    return errors


@PAPER.claim(
    name="attention-is-an-euler-step",
    statement="Softmax attention is one explicit Euler step of the nonlocal flow, and NeuTRENO's "
    "layer one of the regularised flow, with the step 1 / sum_j K_ij for token i.",
    source="Self-attention as a gradient step; the NeuTRENO layer",
    criterion=f"the largest difference is at most {EXACT:g} in every draw, with keys as queries "
    "and with queries of their own, at strengths 0 and 0.6",
)
def attention_is_an_euler_step(run: Run) -> Evidence:
    kinds = [(symmetric, strength) for symmetric in (True, False) for strength in (0.0, 0.6)]
    draws = seeds(run, quick=50, paper=1000)
    items = [
        {"seed": seed, "symmetric": symmetric, "strength": strength}
        for symmetric, strength in kinds
        for seed in draws
    ]
    found = run.map(step_errors, items, label="Euler steps")
    own, common = (np.array([each[name] for each in found]) for name in ("own", "common"))
    return Evidence(
        measured={"draws": len(found), "largest_difference": own.max()},
        holds=bool(own.max() <= EXACT),
        control=Control(
            "one step for all tokens, the mean of theirs",
            {"least_difference": common.min()},
            fails=bool(common.min() > EXACT),
        ),
        figure=_step_figure(items, own, common),
    )


def descend(item: dict[str, Any]) -> dict[str, Any]:
    """The flow from the anchor down the energy, by an integrator on its autograd gradient."""
    rng = np.random.default_rng(item["seed"])
    keys, anchor = normal(rng, 2, TOKENS, WIDTH)
    kernel = (keys @ keys.T / WIDTH**0.5).exp()
    kernel /= kernel.sum(1).mean()  # of the size of attention, so that strengths are comparable
    start, strength = anchor, item["strength"]
    if item["constant"]:
        anchor = anchor.mean(0, keepdim=True).expand_as(anchor)

    def energy(u: Tensor) -> Tensor:
        total: Tensor = nonlocal_energy(kernel, u) + strength * fidelity(u, anchor)
        return total

    def velocity(_: float, u: Array) -> Array:
        at = torch.from_numpy(u.copy()).view(TOKENS, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(energy(at), at)
        return np.asarray(-slope.numpy().ravel())

    rates = torch.linalg.eigvalsh(2 * laplacian(kernel))[1:]
    # What the slowest mode still lacks at the end is e^-30.
    end = 30.0 / float(rates[0] + strength)
    flow = solve_ivp(
        velocity, (0.0, end), start.numpy().ravel(), method="DOP853", rtol=1e-11, atol=1e-13
    )
    path = torch.from_numpy(flow.y.T.copy()).view(-1, TOKENS, WIDTH)
    energies = np.array([float(energy(u)) for u in path])
    gains = strength / (rates[[-1, 0]] + strength)
    return {
        "time": flow.t,
        "ratio": frequency_ratio(path).numpy(),
        "bounds": (gains * frequency_ratio(start)).numpy(),
        "error": float((path[-1] - flow_limit(kernel, anchor, strength)).abs().max()),
        "rise": float(np.diff(energies).max() / energies[0]),
    }


@PAPER.claim(
    name="flow-limits",
    statement="The nonlocal flow ends with all tokens equal; the regularised flow ends at a limit "
    "of its own, which is constant only where the anchor is.",
    source="Gradient flow of the nonlocal functional, without and with the fidelity term",
    criterion=f"at strength 0 the frequency ratio ends below {NEAR:g}; the end is the token mean "
    f"at 0, and strength (2 L + strength I)^-1 F at 0.4 and 0.6, within {NEAR:g}, there with a "
    "ratio within that of F times the gains of the fastest and the slowest mode; the energy never "
    "rises by more than 1e-12 of its start",
)
def flow_limits(run: Run) -> Evidence:
    draws = seeds(run, quick=5, paper=100)
    cases = {f"{strength:g}": (strength, False) for strength in STRENGTHS} | {
        CONSTANT: (0.6, True)
    }
    items = [
        {"seed": seed, "strength": strength, "constant": constant}
        for strength, constant in cases.values()
        for seed in draws
    ]
    results = run.map(descend, items, label="flows")
    found = {
        name: results[i * len(draws) : (i + 1) * len(draws)] for i, name in enumerate(cases)
    }
    constant = found.pop(CONSTANT)
    smooth, *kept = found.values()
    flows = [each for group in found.values() for each in group]
    largest = max(each["ratio"][-1] for each in smooth)
    return Evidence(
        measured={
            "draws": len(draws),
            "largest_ratio_at_0": largest,
            **{
                f"median_ratio_at_{strength:g}": _median_end(group)
                for strength, group in zip(STRENGTHS[1:], kept, strict=True)
            },
            "largest_error_of_the_limit": max(each["error"] for each in flows),
            "largest_rise_of_the_energy": max(each["rise"] for each in flows),
        },
        holds=largest < NEAR
        and all(_stays(each) for group in kept for each in group)
        and all(each["error"] < NEAR and each["rise"] <= 1e-12 for each in flows),
        control=Control(
            "strength 0.6 with a constant anchor, the token mean",
            {"largest_ratio": max(each["ratio"][-1] for each in constant)},
            fails=not any(_stays(each) for each in constant),
        ),
        figure=_flow_figure(found | {CONSTANT: constant}),
    )


def _stays(flow: dict[str, Any]) -> bool:
    low, high = flow["bounds"]
    return bool(
        flow["error"] < NEAR and (1 - NEAR) * low <= flow["ratio"][-1] <= (1 + NEAR) * high
    )


def _median_end(group: list[dict[str, Any]]) -> float:
    return float(np.median([each["ratio"][-1] for each in group]))


def _step_figure(items: list[dict[str, Any]], own: Array, common: Array) -> Any:
    rows = [
        {
            "kind": ("keys as queries" if item["symmetric"] else "queries of their own")
            + f", {item['strength']:g}",
            "step": step,
            # A difference of exactly 0 has no place on a logarithmic axis.
            "difference": max(float(error), 1e-17),
        }
        for step, errors in (("of each token", own), ("the same for all", common))
        for item, error in zip(items, errors, strict=True)
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_tick(thickness=1.5)
        .encode(
            x=alt.X("difference:Q", title="largest difference of step and layer").scale(
                type="log"
            ),
            y=alt.Y("kind:N", title="queries, strength"),
            color=alt.Color("step:N", title="step"),
        )
        .properties(width=400, height=160)
    )


def _flow_figure(found: dict[str, list[dict[str, Any]]]) -> Any:
    rows = [
        {"strength": name, "draw": i, "time": float(time), "ratio": float(ratio)}
        for name, group in found.items()
        for i, flow in enumerate(group[:5])
        for time, ratio in zip(flow["time"], flow["ratio"], strict=True)
        if ratio > 1e-12
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(clip=True)
        .encode(
            x=alt.X("time:Q", title="time of the flow"),
            y=alt.Y("ratio:Q", title="frequency ratio |(I-J)U| / |JU|").scale(type="log"),
            color=alt.Color("strength:N", title="strength", sort=None),
            detail="draw:N",
        )
        .properties(width=400, height=280)
    )
