"""What watching a training costs, as a share of the time of its steps.

    python -m benchmarks.monitor [--json] [--rounds N]

One process, one thread, plain steps and steps with a look taking turns. A look comes every k steps,
so its cost is (look - plain) / (k plain), from the least processor time of either (other work on
the machine only ever adds); beside it the same from each round's wall times, median and range.
Between looks there are four calls of hooks a step: too little to be told from a step's own spread,
so they are timed on a model that costs nothing. The first look of a run surveys the model with one
extra pass in evaluation mode, and is given by itself.
"""

# ruff: noqa: E402
# One thread has to be asked for before torch is imported.
from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import inspect
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from attoscope.monitor import watch
from benchmarks.diagnose import versions
from benchmarks.timing import take_turns

EVERY = inspect.signature(watch).parameters["every"].default
LIMIT = 0.05


def language_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2-like: 6 layers, 8 heads, width 256; 8 sequences of 128 tokens."""
    config = GPT2Config(
        vocab_size=1024, n_embd=256, n_head=8, n_layer=6, n_positions=128,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(1024, (8, 128))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def vision_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """ViT-like: 6 layers, 6 heads, width 192; 16 images of 65 tokens."""
    config = ViTConfig(
        image_size=64, patch_size=8, hidden_size=192, num_hidden_layers=6, num_attention_heads=6,
        intermediate_size=768, id2label={i: str(i) for i in range(10)},
    )  # fmt: skip
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
    return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def measured(
    build: Callable[[], tuple[nn.Module, dict[str, Any]]], rounds: int
) -> dict[str, Any]:
    """Seconds of each kind of step, and the overhead at the default interval."""
    torch.manual_seed(0)
    model, batch = build()
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    log = watch(model, 1)

    def look() -> None:
        with log:
            step()

    step()
    began = time.process_time()
    look()  # surveys the model
    first = time.process_time() - began
    kinds = {"plain": step, "look": look}
    seconds = take_turns(kinds, rounds)
    assert len(log.rows) == rounds + 2
    least = {kind: min(times) for kind, times in seconds["cpu"].items()}
    wall = [
        (with_look - plain) / (EVERY * plain)
        for plain, with_look in zip(*seconds["wall"].values(), strict=True)
    ]
    hooks = seconds_of_hooks()
    return {
        "what": (build.__doc__ or "").rstrip("."),
        "seconds": least,
        "first_look": first - least["plain"],
        "hooks": hooks,
        "look_over_step": least["look"] / least["plain"] - 1,
        "overhead": (least["look"] / least["plain"] - 1) / EVERY + hooks / least["plain"],
        "wall": {"median": median(wall), "least": min(wall), "largest": max(wall)},
    }


def seconds_of_hooks(steps: int = 500, rounds: int = 7) -> float:
    """What a watched step costs beyond a plain one when nothing is read: least of some rounds."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(1, 1)

    def run() -> float:
        began = time.process_time()
        for _ in range(steps):
            model(x).sum().backward()
            optimizer.step()
        return (time.process_time() - began) / steps

    run()
    plain, watched = [], []
    for _ in range(rounds):
        plain.append(run())
        log = watch(model, 10**9)
        log.count = 1  # between looks
        with log:
            watched.append(run())
    return max(0.0, min(watched) - min(plain))


def main() -> None:
    """Measure both models and print a table, or the numbers with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default 15)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = [measured(build, asked.rounds) for build in (language_model, vision_model)]
    result = {"versions": versions(), "every": EVERY, "limit": LIMIT, "models": found}
    print(json.dumps(result, indent=2) if asked.json else in_markdown(result))


def in_markdown(result: dict[str, Any]) -> str:
    """The table of the documentation."""
    lines = [", ".join(f"{name} {text}" for name, text in result["versions"].items()), ""]
    lines += [
        f"| model | plain step | a look adds | hooks add | overhead at every={result['every']} "
        "| by wall time, per round | first look |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in result["models"]:
        wall = one["wall"]
        lines.append(
            f"| {one['what']} | {one['seconds']['plain']:.3f} s | {one['look_over_step']:+.0%} of "
            f"a step | {one['hooks'] * 1e6:.0f} µs | **{one['overhead']:.2%}** | "
            f"{wall['median']:+.2%} ({wall['least']:+.2%} to {wall['largest']:+.2%}) "
            f"| {one['first_look']:.2f} s |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
