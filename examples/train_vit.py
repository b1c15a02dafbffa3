"""Trains the small vision transformer in vit-digits/ on scikit-learn's handwritten digits.

    python examples/train_vit.py [FOLDER]

About two minutes on one core; the same seed gives the same weights on the same machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

EPOCHS, BATCH, PEAK_RATE, SEED = 80, 64, 1e-3, 0
PREPROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 8, "width": 8},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": True,
}


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels as the preprocessor makes them, and labels; a quarter is held out."""
    data = load_digits()
    ink = torch.tensor(data.images).mul(255 / 16).round() / 255
    pixels = ((ink - 0.5) / 0.5).float()[:, None].expand(-1, 3, -1, -1)
    parts = train_test_split(
        pixels.numpy(), data.target, test_size=0.25, random_state=SEED, stratify=data.target
    )
    train, test, train_labels, test_labels = map(torch.tensor, parts)
    return train, train_labels, test, test_labels


def build() -> ViTForImageClassification:
    """17 tokens ([CLS] and 4 x 4 patches of 2 x 2 pixels), 6 layers of 4 heads, width 64."""
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=3,
            hidden_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.1,
            qkv_bias=True,
            id2label={number: str(number) for number in range(10)},
            label2id={str(number): number for number in range(10)},
        )
    )


def shifted(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Every other image, by chance, moved by up to one pixel; what comes in is blank paper."""
    padded = torch.nn.functional.pad(pixels, (1, 1, 1, 1), value=-1.0)
    moves = torch.randint(-1, 2, (len(pixels), 2), generator=generator)
    moves[torch.rand(len(pixels), generator=generator) < 0.5] = 0
    pairs = zip(padded, (moves + 1).tolist(), strict=True)
    return torch.stack([image[:, r : r + 8, c : c + 8] for image, (r, c) in pairs])


def train(model: ViTForImageClassification, pixels: Tensor, labels: Tensor) -> None:
    """AdamW, the rate rising over the first tenth and falling to zero."""
    generator = torch.Generator().manual_seed(SEED)
    steps = EPOCHS * (len(pixels) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=steps, pct_start=0.1
    )
    model.train()
    for epoch in range(EPOCHS):
        order = torch.randperm(len(pixels), generator=generator)
        for chosen in order[: len(pixels) // BATCH * BATCH].split(BATCH):
            logits = model(shifted(pixels[chosen], generator)).logits
            loss = cross_entropy(logits, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    pixels, labels, test_pixels, test_labels = load()
    model = build()
    train(model, pixels, labels)
    model.eval()
    with torch.no_grad():
        right = model(test_pixels).logits.argmax(-1) == test_labels
    print(f"accuracy on {len(right)} held-out digits: {right.float().mean().item():.1%}")
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "vit-digits")
