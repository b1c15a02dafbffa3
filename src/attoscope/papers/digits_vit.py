"""A small vision transformer trained on handwritten digits, plain or with a remedy.

Shared by the papers on over-smoothing. The model is a Hugging Face one that knows nothing of
remedies: 8 × 8 pixels in patches of 2 × 2 (16 and [CLS]), width 32, 8 pre-norm blocks of 2 heads,
perceptrons of twice the width. Everything follows from the seed: weights, order, mixing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.measures.smoothness import family, spectrum
from attoscope.papers.running import Run
from attoscope.remedies.losses import cosine_loss, patch_contrastive_loss
from attoscope.remedies.mixing import MixedBatch, cutmix_on_patch_grid, patch_mixing_loss
from attoscope.remedies.tokens import BlockTokens

WIDTH, HEADS, BLOCKS, GRID, CLASSES = 32, 2, 8, (4, 4), 10
EPOCHS, BATCH, PEAK_RATE, DECAY, WARMUP, CLIP, GAIN = 15, 100, 2e-3, 0.05, 0.2, 1.0, 0.7
HELD_OUT = 397
# What is measured of the patches, after the embedding and after every block.
PROFILE = ("cosine", "absolute_cosine", "frequency_ratio", "effective_rank")
Item = dict[str, Any]


class Digits(NamedTuple):
    """1,400 images to train on and 397 held out, pixels in [-1, 1]; the same split for all."""

    pixels: Tensor
    labels: Tensor
    test_pixels: Tensor
    test_labels: Tensor


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model and what was measured on held-out images, the mean over them.

    Profiles have 9 entries: the patches after the embedding, then after each block (before the
    final norm). `step_seconds` is the median of a training step.
    """

    model: nn.Module = field(repr=False)
    profile: dict[str, NDArray[np.float64]] = field(repr=False)
    accuracy: float
    step_seconds: float

    @property
    def last(self) -> dict[str, float]:
        """The last block's cosine, absolute cosine, frequency ratio and effective rank."""
        return {name: float(values[-1]) for name, values in self.profile.items()}


def train(
    seed: int,
    *,
    treat: Item | None = None,
    losses: dict[str, float] | None = None,
    cutmix: bool = False,
    epochs: int = EPOCHS,
) -> Trained:
    """Trains one model: AdamW, one-cycle rate, batches of 100, gradients clipped at norm 1.

    Args:
        seed: of the weights, the order of images and the mixing.
        treat: a remedy's name as "remedy", and its options, for `attoscope.treat`.
        losses: weights of "cosine" (absolute), "contrastive" (normalised, mean over all patches,
            early tokens of the first block) and "mixing" (its own classifier on the patches after
            the final norm); "mixing" needs `cutmix`.
        cutmix: train on images that are cut along the patch grid.
        epochs: passes over the 1,400 images.

    Raises AttoscopeError for an unknown loss, or "mixing" without `cutmix`.
    """
    with apart():
        trainer = Trainer(seed, treat=treat, losses=losses, cutmix=cutmix)
        seconds = trainer.run(epochs)
        profile, accuracy = measure(trainer.model)
    return Trained(trainer.model, profile, accuracy, seconds)


def build() -> nn.Module:
    """The untrained model, from torch's random state; Xavier-normal weights of gain 0.7."""
    from transformers import ViTConfig, ViTForImageClassification

    names = {number: str(number) for number in range(CLASSES)}
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=WIDTH, num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS, intermediate_size=2 * WIDTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        id2label=names, label2id={name: number for number, name in names.items()},
    )  # fmt: skip
    model: nn.Module = ViTForImageClassification(config)
    model.apply(_initialise)
    return model


@cache
def digits() -> Digits:
    """Scikit-learn's digits, split once, by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    pixels = (data.images[:, None] / 8.0 - 1.0).astype(np.float32)
    parts = train_test_split(
        pixels, data.target, test_size=HELD_OUT, random_state=0, stratify=data.target
    )
    first, test, labels, test_labels = map(torch.from_numpy, parts)
    return Digits(first, labels, test, test_labels)


def measure(model: nn.Module) -> tuple[dict[str, NDArray[np.float64]], float]:
    """Profiles of the patches of the held-out images, and the share of them that is right."""
    data = digits()
    model.eval()
    with torch.no_grad():
        output = model(data.test_pixels, output_hidden_states=True)
    accuracy = float((output.logits.argmax(-1) == data.test_labels).double().mean())
    rows = [_read(state[:, 1:].double()) for state in output.hidden_states]
    return {name: np.array([row[name] for row in rows]) for name in PROFILE}, accuracy


def finished(run: Run, items: list[Item], label: str) -> list[Item]:
    """`run.map(trial, items, label)`, not again for what another claim of this process trained.

    All that a model depends on stands in its item, so equal items have equal results.
    """
    names = [json.dumps(item, sort_keys=True) for item in items]
    missing = {name: item for name, item in zip(names, items, strict=True) if name not in _DONE}
    results = run.map(trial, missing.values(), label=label)
    _DONE.update(zip(missing, results, strict=True))
    return [_DONE[name] for name in names]


_DONE: dict[str, Item] = {}


def trial(item: Item) -> Item:
    """`train(**item)` as plain data: its profiles, accuracy and seconds per step."""
    result = train(**item)
    return {
        **result.profile,
        "accuracy": result.accuracy,
        "step_seconds": result.step_seconds,
    }


class Trainer:
    """A model with its optimiser, one step at a time; `train` says what the arguments are."""

    def __init__(
        self,
        seed: int,
        *,
        treat: Item | None = None,
        losses: dict[str, float] | None = None,
        cutmix: bool = False,
    ) -> None:
        self.weights = _checked(dict(losses or {}), cutmix)
        self.seed, self.cutmix = seed, cutmix
        self.draw = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model: Any = build()
        self.head = nn.Linear(WIDTH, CLASSES)
        _initialise(self.head)
        if treat is not None:
            _treat(self.model, treat, seed)
        self.tokens = BlockTokens(self.model) if self.weights else None
        trained = [self.model, self.head] if "mixing" in self.weights else [self.model]
        self.parameters = [p for module in trained for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=PEAK_RATE, weight_decay=DECAY)

    def run(self, epochs: int) -> float:
        """Trains to the end, at a rate that rises and falls; the median of seconds per step."""
        data, order = digits(), torch.Generator().manual_seed(self.seed)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            PEAK_RATE,
            total_steps=epochs * (len(data.pixels) // BATCH),
            pct_start=WARMUP,
        )
        self.model.train()
        seconds = []
        for _ in range(epochs):
            for chosen in torch.randperm(len(data.pixels), generator=order).split(BATCH):
                start = time.perf_counter()
                self.step(data.pixels[chosen], data.labels[chosen])
                seconds.append(time.perf_counter() - start)
                schedule.step()
        if self.tokens is not None:
            self.tokens.close()
        return float(np.median(seconds))

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step on a batch."""
        loss = self._loss(images, labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        target, mixed = labels, None
        if self.cutmix:
            mixed = cutmix_on_patch_grid(
                images, labels, GRID, classes=CLASSES, generator=self.draw
            )
            images, target = mixed.images, mixed.labels
        loss = F.cross_entropy(self.model(images).logits, target)
        for name, weight in self.weights.items():
            loss = loss + weight * self._extra(name, mixed)
        return loss

    def _extra(self, name: str, mixed: MixedBatch | None) -> Tensor:
        assert self.tokens is not None
        last = self.tokens.last
        if name == "cosine":
            return cosine_loss(last)
        if name == "contrastive":
            return patch_contrastive_loss(last, self.tokens.first)
        assert mixed is not None
        normed = self.model.vit.layernorm(last)
        return patch_mixing_loss(self.head(normed), mixed.patch_labels)


def _checked(weights: dict[str, float], cutmix: bool) -> dict[str, float]:
    if unknown := sorted(weights.keys() - {"cosine", "contrastive", "mixing"}):
        raise AttoscopeError(
            f"losses: got {unknown[0]!r}; expected cosine, contrastive or mixing"
        )
    if "mixing" in weights and not cutmix:
        raise AttoscopeError("losses: mixing needs mixed images; give cutmix=True with it")
    return weights


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_normal_(module.weight.data.flatten(1), gain=GAIN)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _treat(model: nn.Module, treat: Item, seed: int) -> None:
    import attoscope

    options = {name: value for name, value in treat.items() if name != "remedy"}
    if options.get("start") == "random":
        options["seed"] = seed
    attoscope.treat(model, treat["remedy"], digits().pixels[:2], **options)


def _read(patches: Tensor) -> dict[str, float]:
    here = torch.ones(patches.shape[:2], dtype=torch.bool)
    cosine, ratio, _ = family(patches, here)
    absolute, _, rank, *_ = spectrum(patches, here)
    values = (cosine, absolute, ratio, rank)
    return {name: float(x.nanmean()) for name, x in zip(PROFILE, values, strict=True)}


@contextmanager
def apart() -> Iterator[None]:
    """One thread and a random state of our own; the caller's are put back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
