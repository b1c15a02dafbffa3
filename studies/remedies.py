"""What does each remedy against over-smoothing do to a small vision transformer?

    python -m studies.remedies            every remedy, three seeds (40 minutes on a busy core)
    python -m studies.remedies --quick    one seed, five epochs; prints the table and writes nothing
    python -m studies.remedies --page     writes the page anew from what was measured

Writes docs/studies/remedies.json and docs/treating.md. Finished runs are kept in .cache/remedies
and not run again; delete it to start afresh.
"""

# ruff: noqa: E402
# One thread has to be asked for before torch is imported.
from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from attoscope.papers.digits_vit import (
    BATCH,
    EPOCHS,
    PROFILE,
    Item,
    Trainer,
    apart,
    digits,
    trial,
)

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_suffix(".md")
KEPT, RESULT, PAGE = (
    ROOT / ".cache" / "remedies", ROOT / "docs" / "studies" / "remedies.json",
    ROOT / "docs" / "treating.md",
)  # fmt: skip
SEEDS, TURNS, STEPS = 3, 9, 6
SCALES = ("attnscale", "featscale")
ALL = {"cosine": 1.0, "contrastive": 1.0, "mixing": 1.0}


@dataclass(frozen=True)
class Row:
    """A row of the table: its name, how it is trained, and which row it is compared with."""

    name: str
    recipe: Item
    base: str = "nothing"

    def item(self, seed: int, epochs: int) -> Item:
        """What `digits_vit.trial` takes."""
        return {"seed": seed, "epochs": epochs, **self.recipe}


def treated(name: str, remedy: str, **options: Any) -> Row:
    """A row whose model is treated before training."""
    return Row(name, {"treat": {"remedy": remedy, **options}})


ROWS = (
    Row("nothing", {}),
    treated("spectral, sharpen", "spectral", mode="sharpen", start="random"),
    treated("spectral, smooth", "spectral", mode="smooth", start="random"),
    treated("neutreno 0.6", "neutreno", strength=0.6),
    treated("neutreno 0.6, anchor zero", "neutreno", strength=0.6, anchor="zero"),
    treated("neutreno 0.6, anchor mean", "neutreno", strength=0.6, anchor="mean"),
    treated("attnscale", "attnscale"),
    treated("featscale", "featscale"),
    treated("centred", "centred"),
    treated("value_residual", "value_residual"),
    Row("cosine loss", {"losses": {"cosine": 1.0}}),
    Row("contrastive loss", {"losses": {"contrastive": 1.0}}),
    Row("CutMix", {"cutmix": True}),
    Row("CutMix, mixing loss", {"cutmix": True, "losses": {"mixing": 1.0}}, "CutMix"),
    Row("CutMix, all three losses", {"cutmix": True, "losses": ALL}, "CutMix"),
)


def kept(name: str, mark: Item, measure: Any) -> Any:
    """What `measure()` gave for this mark, from the file of that name where it is there."""
    path = KEPT / f"{name}.json"
    if path.exists() and (old := json.loads(path.read_text()))["mark"] == mark:
        return old["found"]
    found = measure()
    KEPT.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps({"mark": mark, "found": found}))
    path.with_suffix(".part").replace(path)
    return found


def run_of(row: Row, seed: int, epochs: int) -> Item:
    """One trained model's measures, as plain numbers."""
    start = time.perf_counter()
    item = row.item(seed, epochs)

    def measure() -> Item:
        found = trial(item)
        return {k: v.tolist() if k in PROFILE else v for k, v in found.items()}

    found = kept(f"{slug(row.name)}-{seed}-{epochs}", item, measure)
    last = found["cosine"][-1]
    print(
        f"{row.name}, seed {seed}: cosine {last:.3f}, {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    return found


def cost_of(row: Row) -> float:
    """Time of a training step over that without a remedy: median of turns taken by the two."""

    def measure() -> float:
        data = digits()
        batch = data.pixels[:BATCH], data.labels[:BATCH]
        with apart():
            pair = [Trainer(0, **ROWS[0].recipe), Trainer(0, **row.recipe)]
            for trainer in pair:
                trainer.model.train()
            ratios = []
            for turn in range(TURNS + 1):
                plain, other = (seconds(trainer, batch) for trainer in pair)
                if turn:  # the first turn warms up
                    ratios.append(other / plain)
        return median(ratios)

    return kept(
        f"{slug(row.name)}-cost", {"turns": TURNS, "steps": STEPS, **row.recipe}, measure
    )


def moved_of(row: Row, epochs: int) -> float:
    """How far the scales of a remedy that starts as no change went, at most (seed 0)."""

    def measure() -> float:
        with apart():
            trainer = Trainer(0, **row.recipe)
            trainer.run(epochs)
        named = trainer.model.named_parameters()
        return max(float(p.detach().abs().max()) for name, p in named if "attoscope_" in name)

    return kept(f"{slug(row.name)}-moved-{epochs}", {"epochs": epochs, **row.recipe}, measure)


def seconds(trainer: Trainer, batch: tuple[Any, Any]) -> float:
    """Of the fastest of a few steps."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        trainer.step(*batch)
        times.append(time.perf_counter() - start)
    return min(times)


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def table(seeds: int, epochs: int) -> list[Item]:
    """All rows, measured; seed by seed, so that an interrupted study has whole seeds."""
    runs: dict[str, list[Item]] = {row.name: [] for row in ROWS}
    for seed in range(seeds):
        for row in ROWS:
            runs[row.name].append(run_of(row, seed, epochs))
    return [
        {
            "name": row.name, "recipe": row.recipe, "base": row.base, "step_ratio": cost_of(row),
            **{key: [run[key][-1] for run in runs[row.name]] for key in PROFILE},
            "accuracy": [run["accuracy"] for run in runs[row.name]],
            "cosine_by_block": [run["cosine"] for run in runs[row.name]],
            "moved": moved_of(row, epochs) if row.name in SCALES else None,
        }
        for row in ROWS
    ]  # fmt: skip


def spread(values: list[float], digits: int = 2) -> str:
    """Mean, and the range over seeds."""
    low, high = min(values), max(values)
    shown = f"{mean(values):.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ({low:.{digits}f} to {high:.{digits}f})"


HEAD = (
    "| remedy | cosine | absolute cosine | HC/LC | effective rank | accuracy | step time |\n"
    "| --- | --- | --- | --- | --- | --- | --- |\n"
)


def lines(rows: list[Item]) -> str:
    """The table in Markdown."""
    return HEAD + "".join(
        f"| {row['name']} | {spread(row['cosine'])} | {spread(row['absolute_cosine'])} "
        f"| {spread(row['frequency_ratio'])} | {spread(row['effective_rank'], 1)} "
        f"| {spread(row['accuracy'], 3)} | {row['step_ratio']:.2f} |\n"
        for row in rows
    )


def against(rows: dict[str, Item], name: str, key: str = "cosine") -> list[float]:
    """The row's values over those of what it is compared with, seed by seed."""
    base = rows[rows[name]["base"]][key]
    return [a / b for a, b in zip(rows[name][key], base, strict=True)]


def direction(ratios: list[float]) -> str:
    """What all seeds agree on, or that they do not."""
    if max(ratios) < 1.0:
        return "lowers"
    return "raises" if min(ratios) > 1.0 else "lowers or raises, by the seed,"


def page(study: Item) -> str:
    """The template with the table, and sentences whose numbers and verbs are those of the runs."""
    rows = {row["name"]: row for row in study["rows"]}
    words: dict[str, str] = {}
    for name in rows:
        ratios = against(rows, name)
        words |= {f"ratio {name}": spread(ratios), f"verb {name}": direction(ratios)}
        words |= {f"{key} {name}": spread(rows[name][key]) for key in PROFILE}
        words[f"rank verb {name}"] = direction(against(rows, name, "effective_rank"))
    every = [value for row in study["rows"] for value in row["accuracy"]]
    words |= {f"moved {name}": f"{rows[name]['moved']:.2f}" for name in SCALES}
    shown = {"least": f"{min(every):.3f}", "most": f"{max(every):.3f}"}
    shown |= {"table": lines(study["rows"]), "seeds": str(study["seeds"])}
    text = TEMPLATE.read_text()
    for key, value in (words | shown | {"epochs": str(study["epochs"])}).items():
        text = text.replace(f"<{key}>", value)
    if left := re.findall(r"<[a-z].*?>", text):
        raise SystemExit(f"{TEMPLATE.name}: nothing was measured for {', '.join(left)}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, five epochs")
    parser.add_argument("--page", action="store_true", help="the page alone, from the numbers")
    options = parser.parse_args()
    if options.quick:
        print(lines(table(1, 5)))
        return
    if not options.page:
        study = {"seeds": SEEDS, "epochs": EPOCHS, "rows": table(SEEDS, EPOCHS)}
        RESULT.write_text(json.dumps(study, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
