"""Moments of the gradients, layer by layer, and how they surprise Adam."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

REST = "rest"
MEANINGS = {
    "gradient_norm": "norm of a layer's gradient; without a site, of the whole model's",
    "gradient_rms": "square root of the second moment of a layer's gradient",
    "gradient_mean": "first moment of a layer's gradient",
    "gradient_peak": "largest absolute entry over the root mean square",
    "adam_surprise": "root mean square of gradient over sqrt(Adam's second moment): above 1, "
    "gradients are larger than Adam believes",
}


def by_layer(model: nn.Module, layers: Mapping[str, str]) -> dict[str, list[nn.Parameter]]:
    """Trainable parameters by site; `layers` gives a module's name for each site.

    What belongs to no layer (embeddings, the head, the last norm) is the "rest". A parameter
    shared by layers counts for the first.
    """
    groups: dict[str, list[nn.Parameter]] = {site: [] for site in layers}
    groups[REST] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inside = (s for s, module in layers.items() if name.startswith(f"{module}."))
            groups[next(inside, REST)].append(parameter)
    return {site: parameters for site, parameters in groups.items() if parameters}


@torch.no_grad()
def moments(
    groups: Mapping[str, Iterable[nn.Parameter]], scale: float = 1.0
) -> dict[str, float]:
    """First and second moment, norm and peak of the gradients of each group, by "name/site".

    `scale` is what the loss was multiplied by (`GradScaler`). Groups without a gradient are left
    out; without any the result is empty.
    """
    found: dict[str, float] = {}
    total = 0.0
    for site, parameters in groups.items():
        gradients = [_dense(p.grad) for p in parameters if p.grad is not None]
        if not gradients:
            continue
        device = gradients[0].device
        numbers = [
            [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients],
            [g.sum(dtype=torch.float32) for g in gradients],
            [torch.linalg.vector_norm(g, math.inf, dtype=torch.float32) for g in gradients],
        ]
        stacked = torch.stack([torch.stack([n.to(device) for n in row]) for row in numbers])
        norms, sums, peaks = (
            stacked.double().cpu() if device.type == "mps" else stacked.double()
        )
        count = sum(g.numel() for g in gradients)
        parts = torch.stack([norms.square().sum(), sums.sum(), peaks.amax()]).tolist()
        square, summed, peak = parts[0] / scale**2, parts[1] / scale, parts[2] / scale
        total += square
        rms = math.sqrt(square / count)
        found |= {
            f"gradient_norm/{site}": math.sqrt(square),
            f"gradient_rms/{site}": rms,
            f"gradient_mean/{site}": summed / count,
            f"gradient_peak/{site}": peak / rms if rms > 0 else math.nan,
        }
    if found:
        found["gradient_norm"] = math.sqrt(total)
    return found


@torch.no_grad()
def adam_surprise(
    groups: Mapping[str, Iterable[nn.Parameter]],
    optimizer: torch.optim.Optimizer,
) -> dict[str, float]:
    """RMS_t = sqrt(mean(g^2 / max(u, eps^2))) of each group, u Adam's second moment after the step.

    Empty for optimisers without one. Gradients are divided by a `GradScaler`'s scale by then.
    Source: Wortsman et al. 2023 (arXiv 2304.13013).
    """
    owned: dict[int, dict[str, Any]] = {
        id(p): group for group in optimizer.param_groups for p in group["params"]
    }
    found: dict[str, float] = {}
    for site, parameters in groups.items():
        sums: list[Tensor] = []
        count = 0
        for p in parameters:
            state = optimizer.state.get(p, {})
            square = state.get("exp_avg_sq")
            group = owned.get(id(p), {})
            if p.grad is None or p.grad.is_sparse or square is None or "betas" not in group:
                continue
            step = float(state.get("step", 0))
            corrected = square.float() / (1 - group["betas"][1] ** step) if step else square
            floor = group.get("eps", 1e-8) ** 2
            sums.append((p.grad.float().square() / corrected.clamp(min=floor)).sum())
            count += p.numel()
        if count:
            total = torch.stack([s.to(sums[0].device) for s in sums]).sum()
            found[f"adam_surprise/{site}"] = math.sqrt(float(total) / count)
    return found


def _dense(gradient: Tensor) -> Tensor:
    """A sparse gradient's values; the zeros that it leaves out count for no moment."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
