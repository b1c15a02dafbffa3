"""The models of the study: packaged ones, their freshly initialised twins, and a small one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from attoscope.trace import Batch, Subject, batches
from examples import assets

VOCABULARY, LENGTH, PERIODS = 48, 48, (8, 20)


def texts(count: int) -> list[str]:
    """News articles."""
    return [path.read_text(encoding="utf-8") for path in assets.bbc(count)]


def fresh(subject: Subject, seed: int) -> Subject:
    """A twin of the model as it was before training: same configuration, new random weights."""
    torch.manual_seed(seed)
    model: Any = type(subject.model)(subject.config)
    model = model.to(subject.dtype).eval()
    return Subject.of(
        model, tokenizer=subject.tokenizer, image_processor=subject.image_processor
    )


def loaded(name: str) -> tuple[Subject, Callable[[int, int], list[Batch]]]:
    """A packaged model, and what makes its batches: (documents, tokens) -> batches."""
    find: dict[str, Callable[[], Any]] = {
        "minilm": assets.minilm,
        "smollm2": assets.smollm2,
        "reactions": lambda: assets.reaction_bert("bert_pretrained"),
        "digits": lambda: assets.VIT_DIGITS,
    }
    subject = Subject.load(find[name](), dtype="float32")

    def data(documents: int, tokens: int) -> list[Batch]:
        if name == "reactions":
            read: Any = list(assets.REACTIONS[:documents])
        elif name == "digits":
            from sklearn.datasets import load_digits

            grey = (load_digits().images[:documents] * 255 / 16).round().astype(np.uint8)
            read = list(np.repeat(grey[..., None], 3, axis=-1))
        else:
            read = texts(documents)
        return [next(batches(subject, read, max_tokens=tokens, batch_size=documents))]

    return subject, data


def repeated(count: int, rng: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
    """Random tokens that repeat with a period of 8 to 20, and the period of each sequence.

    What follows is known once the first token has come back, to whoever attends to the token
    after the last one like this: position t to t - period + 1.
    """
    periods = rng.integers(*PERIODS, count, endpoint=True)
    # Tokens within a period differ, so that the last one like this is unique.
    words = np.argsort(rng.random((count, VOCABULARY)), axis=1)[:, : PERIODS[1]]
    places = np.arange(LENGTH)[None, :] % periods[:, None]
    return torch.from_numpy(np.take_along_axis(words, places, 1)), periods


def small(seed: int) -> Any:
    """Two layers of four heads, width 64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def training(seed: int, steps: int, looks: tuple[int, ...]) -> Iterator[tuple[int, float, Any]]:
    """Trains the small model on repeated tokens; at each look: (step, accuracy, the model).

    Accuracy is that of the next token where it is known, on sequences of its own.
    """
    model, rng = small(seed), np.random.default_rng(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(steps + 1):
        if step in looks:
            model.eval()
            yield step, _accuracy(model, seed), model
            model.train()
        ids, periods = repeated(64, rng)
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        scores = model(input_ids=ids).logits[:, :-1]
        known = torch.from_numpy(np.arange(LENGTH - 1)[None, :] >= periods[:, None])
        loss = torch.nn.functional.cross_entropy(scores[known], ids[:, 1:][known])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@torch.no_grad()
def _accuracy(model: Any, seed: int) -> float:
    ids, periods = repeated(64, np.random.default_rng([seed, 1]))
    best = model(input_ids=ids).logits[:, :-1].argmax(-1)
    known = torch.from_numpy(np.arange(LENGTH - 1)[None, :] >= periods[:, None])
    return float((best == ids[:, 1:])[known].double().mean())
