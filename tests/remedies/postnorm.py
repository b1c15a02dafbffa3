"""Post-norm models with random numbers, and what tests do with their factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attoscope.remedies import Treatment
from attoscope.trace import Batch, Subject
from tests.models import HEADS, TOKENS, WIDTH
from tests.remedies.treated import sized

POST_NORM = ("bert", "roberta", "bart", "encoder", "encoder_time_first", "mpnet")


def double(name: str) -> tuple[Subject, Batch]:
    subject, batch = sized(name)
    subject.model.double()
    return subject, batch


def encoder(dropout: float = 0.0, layers: int = 3) -> tuple[nn.TransformerEncoder, Tensor]:
    """Post-norm, float64, all numbers random."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 48, dropout=dropout, batch_first=True, dtype=torch.float64
    )
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model, torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)


def vary(treatment: Treatment, low: float = 0.5) -> None:
    """Give every factor a value of its own."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in treatment.modules:
            omega: Any = module.omega
            omega.copy_(low + 2 * torch.rand(omega.shape, generator=generator))


def valid(batch: Batch, values: Tensor) -> Tensor:
    """Rows of real tokens, where rows are tokens."""
    if batch.valid is None or batch.valid.shape != values.shape[:2]:
        return values
    return values[batch.valid]
