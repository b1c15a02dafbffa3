"""Small models, a training loop, and what must be left of a watch: nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optim
from torch.utils.checkpoint import checkpoint

from tests.models import VOCABULARY, WIDTH, Nano

TOKENS, BATCH = 10, 4


class Encoder(nn.Module):
    """torch's own layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


class Checkpointed(Nano):
    """Every block, or the whole, is computed again in the backward pass."""

    reentrant = False

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.ln_f(x))


def train(
    model: nn.Module,
    watched: Callable[[nn.Module], Any] | None = None,
    steps: int = 5,
    call: nn.Module | None = None,
    autocast: bool = False,
) -> tuple[list[Any], Any]:
    """A plain loop; gives losses, weights and the next random number, and the log."""
    model.train()
    call = model if call is None else call
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = []
    with watched(call) if watched else nullcontext() as log:
        for _ in range(steps):
            x = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(call, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return [losses, *(p.detach().clone() for p in model.parameters()), torch.rand(3)], log


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())


def batch() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, TOKENS))


def same(left: list[Any], right: list[Any]) -> bool:
    """Equal to the last bit."""
    return left[0] == right[0] and all(map(torch.equal, left[1:], right[1:]))


def nothing_is_left(model: nn.Module) -> bool:
    hooks = any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m)
        for m in model.modules()
    )
    steps = optim._global_optimizer_pre_hooks or optim._global_optimizer_post_hooks
    return not hooks and not steps and torch._C._len_torch_function_stack() == 0
