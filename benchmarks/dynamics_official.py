"""The published procedure for local convergence, written from its description: one trial at a time,
a torch module with linear layers, autograd, SGD on gradients divided by their norm, and cvxpy with
one constraint object for each token and its default solver.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from attoscope.dynamics import AttentionData
from attoscope.svm import AttentionSVM, Selection, certify
from benchmarks.svm_peers import official

EPS = torch.finfo(torch.float64).eps
NORMS = ("frobenius", "nuclear")


@dataclass
class Readings:
    """Per step: correlation with each norm's solution and the mean largest probability."""

    correlations: dict[str, np.ndarray]
    probabilities: np.ndarray
    seconds: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)


class Layer(nn.Module):
    """Attention of one query per sequence, with W or with keys and queries, and a fixed head."""

    def __init__(self, width: int, factored: bool) -> None:
        super().__init__()
        self.factored = factored
        if factored:
            self.query = nn.Linear(width, width, bias=False)
            self.key = nn.Linear(width, width, bias=False)
        else:
            self.both = nn.Linear(width, width, bias=False)
        self.double()

    def forward(self, x: torch.Tensor, z: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.factored:
            logits = self.query(z)[:, None] @ self.key(x).transpose(-2, -1)
        else:
            logits = z[:, None] @ self.both(x).transpose(-2, -1)
        self.probabilities = torch.softmax(logits, dim=-1)
        return (self.probabilities @ x @ v).view(-1)

    def weight(self) -> np.ndarray:
        with torch.no_grad():
            if self.factored:
                return (self.key.weight.T @ self.query.weight).numpy()
            return self.both.weight.T.numpy().copy()


def starts(seed: int, width: int, factored: bool) -> tuple[Layer, list[np.ndarray]]:
    """A layer with the default initialisation, and W, or K and Q, that it starts from."""
    torch.manual_seed(seed)
    layer = Layer(width, factored)
    linears = [layer.key, layer.query] if factored else [layer.both]
    return layer, [linear.weight.detach().T.numpy().copy() for linear in linears]


def gap(selection: Selection, weight: np.ndarray, norm: str) -> float:
    """Certified relative gap of a solution, from a lower bound of ours."""
    lower = AttentionSVM(norm, tol=1e-8).fit_selection(selection).lower_bound_
    none = np.zeros(selection.selected.shape)
    return certify(selection, weight, none, norm).upper / lower - 1.0


def trial(data: AttentionData, seed: int, factored: bool, steps: int, lr: float) -> Readings:
    """One data set (its only trial), one parameterisation: training, two solutions, curves."""
    x, z, y, v = (
        torch.from_numpy(part[0].copy())
        for part in (data.tokens, data.queries, data.labels, data.head.v)
    )
    layer, _ = starts(seed, x.shape[-1], factored)
    optimiser = torch.optim.SGD(layer.parameters(), lr=lr)
    weights, probabilities = np.zeros((steps, *[x.shape[-1]] * 2)), np.zeros(steps)
    began = time.process_time()
    for step in range(steps):
        optimiser.zero_grad()
        loss = torch.log(1 + torch.exp(-y * layer(x, z, v))).mean()
        if factored:
            loss = loss + EPS * sum(p.norm() ** 2 for p in layer.parameters())
        loss.backward()
        for p in layer.parameters():
            p.grad /= p.grad.norm() + EPS
        optimiser.step()
        weights[step] = layer.weight()
        most, chosen = layer.probabilities.detach()[:, 0].max(dim=-1)
        probabilities[step] = most.mean()
    readings = Readings({}, probabilities, {"training": time.process_time() - began})
    selection = data.selection(0, chosen.numpy())
    for norm in NORMS:
        began = time.process_time()
        solution = official(selection, norm)
        readings.seconds[norm] = time.process_time() - began
        if solution is None:
            raise RuntimeError(f"seed {seed}: the {norm} problem was not solved")
        readings.gaps[norm] = gap(selection, solution, norm)
        began = time.process_time()
        solution = solution / np.linalg.norm(solution)
        curve = np.zeros(steps)
        for step, weight in enumerate(weights):
            curve[step] = solution.ravel().dot((weight / np.linalg.norm(weight)).ravel())
        readings.correlations[norm] = curve
        readings.seconds["correlations"] = (
            readings.seconds.get("correlations", 0.0) + time.process_time() - began
        )
    return readings
