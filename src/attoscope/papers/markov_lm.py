"""A small language model on a lag-2 Markov chain: the task of the papers on initialisation.

`x_t` is one of two successors of `x_{t-2}` with equal probability; the table of successors is
fixed. A model that has learnt nothing but the marginal of each position has the loss `plateau`, one
that has learnt the chain the loss `floor`; both are computed. To learn it a model has to look two
tokens back.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from attoscope.remedies import Treatment, treat

WORDS, LENGTH, LAST = 32, 32, 20
WIDTH, HEADS, HIDDEN = 64, 4, 256
RATE, BETAS = 1e-3, (0.9, 0.98)
SETTING = (
    f"causal language model, {WORDS} words, {LENGTH} tokens, width {WIDTH}, {HEADS} heads, no "
    f"dropout, Adam {BETAS} with the constant rate {RATE:g} and no warm-up; "
    f"score: mean loss of the last {LAST} steps"
)
Item = dict[str, Any]


@cache
def successors() -> Int[Tensor, "words 2"]:
    """The two successors of every word."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, WORDS, (WORDS, 2), generator=generator)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Exact losses in nats, mean over positions 2 to 31: of the chain, of each marginal alone."""

    floor: float
    plateau: float


@cache
def bounds() -> Bounds:
    """The loss of a model that knows the chain, and of one that knows each position's marginal.

    The first two tokens are uniform, so `p_t = p_{t-2} T` with T the transition matrix.
    """
    step = torch.zeros(WORDS, WORDS, dtype=torch.float64)
    step.scatter_add_(1, successors(), torch.full((WORDS, 2), 0.5, dtype=torch.float64))
    own = torch.special.entr(step).sum(1)
    # The even and the odd tokens are chains of their own with the same law.
    marginal = torch.full((WORDS,), 1 / WORDS, dtype=torch.float64)
    floors, plateaus = [], []
    for _ in range(2, LENGTH, 2):
        floors.append(float(marginal @ own))
        marginal = marginal @ step
        plateaus.append(float(torch.special.entr(marginal).sum()))
    return Bounds(sum(floors) / len(floors), sum(plateaus) / len(plateaus))


def draw(count: int, generator: torch.Generator) -> Int[Tensor, "count length"]:
    """Sequences of the chain, the first two tokens uniform."""
    made = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    choice = torch.randint(0, 2, (count, LENGTH), generator=generator)
    table = successors()
    for t in range(2, LENGTH):
        made[:, t] = table[made[:, t - 2], choice[:, t]]
    return made


class Block(nn.Module):
    """Causal attention and a ReLU MLP, normalised before each branch or after each sum."""

    def __init__(self, norm: Literal["pre", "post"]) -> None:
        super().__init__()
        self.pre = norm == "pre"
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def attend(self, x: Float[Tensor, "batch token width"]) -> Tensor:
        """The attention branch."""
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Float[Tensor, "batch token width"]) -> Tensor:
        if self.pre:
            x = x + self.attend(self.norm1(x))
            return x + self.down(F.relu(self.up(self.norm2(x))))  # type: ignore[no-any-return]
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(F.relu(self.up(x))))  # type: ignore[no-any-return]


class MarkovModel(nn.Module):
    """Embeddings, blocks, a last norm (pre-norm) and an output layer of its own."""

    def __init__(self, layers: int, norm: Literal["pre", "post"]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.start = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(layers))
        self.last = nn.LayerNorm(WIDTH) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Int[Tensor, "batch token"]) -> Float[Tensor, "batch token w"]:
        at = torch.arange(input_ids.shape[1])
        x = self.start(self.words(input_ids) + self.places(at))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))  # type: ignore[no-any-return]


def build(layers: int, norm: Literal["pre", "post"], seed: int) -> MarkovModel:
    """A model with Xavier uniform weights (queries, keys and values as one matrix), biases 0."""
    torch.manual_seed(seed)
    model = MarkovModel(layers, norm)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "words" not in name and "places" not in name:
            nn.init.xavier_uniform_(parameter)
        elif "norm" not in name and parameter.dim() == 1 and name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def treated(item: Item) -> tuple[MarkovModel, Treatment | None]:
    """The item's model, with its remedy where it names one: ("admin", {"scale": "O(logn)"})."""
    model = build(item["layers"], item["norm"], item["seed"])
    if item.get("remedy") is None:
        return model, None
    name, options = item["remedy"]
    generator = torch.Generator().manual_seed(item["seed"] + 1)
    data = {"input_ids": draw(item["batch"], generator)}
    return model, treat(model, name, data, **options)


def train(item: Item) -> dict[str, Any]:
    """Train one model; its score, the loss of every step, and seconds.

    `item`: layers, norm, seed, batch, steps, `remedy` (name and options, or None), `warmup` steps.
    """
    begun = time.perf_counter()
    model, _ = treated(item)
    model.train()
    generator = torch.Generator().manual_seed(item["seed"])
    optimizer = torch.optim.Adam(model.parameters(), RATE, BETAS, fused=True)
    warmup, losses = item.get("warmup", 0), []
    for step in range(item["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / (warmup + 1))
        ids = draw(item["batch"], generator)
        logits = model(ids)[:, 1:-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    score = sum(losses[-LAST:]) / LAST
    seconds = time.perf_counter() - begun
    return {"score": score if math.isfinite(score) else math.inf, "losses": losses,
            "seconds": seconds}  # fmt: skip
