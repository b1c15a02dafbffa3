"""Is a trained attention head a max-margin selector? The study behind docs/heads.md.

    python -m studies.heads           all models, all seeds (15 minutes on two busy cores)
    python -m studies.heads --quick   fewer documents, seeds and layers (4 minutes)

Writes docs/studies/heads.json and the figures docs/heads-*.svg. Finished parts are kept in
$ATTOSCOPE_CACHE (default ~/.cache/attoscope) and not run again; --again runs them anew.
"""

# ruff: noqa: E402
# One thread has to be asked for before numpy is imported.
from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from studies import heads_figures as figures
from studies.heads_measure import FILTERS, records, site_list
from studies.heads_models import fresh, loaded
from studies.heads_rank import RankPart, rank_records, rank_tables
from studies.heads_summary import discrimination, plain, pooled
from studies.heads_training import followed

DOCS = Path(__file__).resolve().parent.parent / "docs"


@dataclass(frozen=True)
class Part:
    """One model in one space: how much of it is read."""

    model: str
    space: str
    documents: int
    tokens: int
    queries: int
    every: int
    twins: int
    filters: tuple[str, ...] = FILTERS
    more: bool = False
    label: bool = False

    @property
    def name(self) -> str:
        """As in the tables."""
        return f"{self.model}, {self.space} space"


QUICK = (
    Part("minilm", "head", 8, 48, 96, 2, 1, FILTERS[:2], more=True, label=True),
    Part("minilm", "stream", 8, 48, 96, 5, 1, FILTERS[:2]),
)
FULL = (
    Part("minilm", "head", 16, 64, 192, 1, 2, more=True, label=True),
    Part("smollm2", "head", 12, 64, 144, 10, 1, FILTERS[:2]),
    Part("reactions", "head", 16, 64, 192, 4, 1, FILTERS[:2]),
    Part("digits", "head", 32, 64, 192, 3, 1, FILTERS[:1]),
    Part("minilm", "stream", 16, 64, 128, 3, 1, FILTERS[:2]),
)
RANK = {
    "quick": RankPart("minilm", 8, 48, 96, 3, (0,), seconds=5.0),
    "full": RankPart("minilm", 16, 64, 128, 3, (0, 2, 4, 6, 8, 10), seconds=10.0),
}
TRAINING = {"quick": (1, 500), "full": (1, 1500)}


def measured(part: Part) -> dict[str, Any]:
    """The records of the trained model and of its fresh twins, and the tables made of them."""
    subject, data = loaded(part.model)
    read = data(part.documents, part.tokens)
    sites = site_list(subject, read, part.every)
    settings: dict[str, Any] = {
        "space": part.space, "sites": sites, "queries": part.queries, "filters": part.filters,
    }  # fmt: skip
    trained = records(subject, read, more=part.more, label=part.label, **settings)
    twins = []
    for seed in range(part.twins):
        twins += records(fresh(subject, seed), read, seed=seed, more=part.more, **settings)
    return {"trained": trained, "fresh": twins}


def tables(part: Part, found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of the records: pooled held-out shares, and what discriminates."""
    out: dict[str, Any] = {"part": asdict(part), "held_out": [], "discrimination": []}
    for name in part.filters:
        own, twin = ([r for r in found[k] if r["filter"] == name] for k in ("trained", "fresh"))
        for kind, rows in (("trained", own), ("fresh", twin)):
            learners = rows[0]["held_out"] if rows else ()
            for learner in learners:
                row = pooled(rows, learner, "held_out", 0)
                out["held_out"].append(
                    {"filter": name, "weights": kind, "learner": learner, **(row or {})}
                )
            for learner in rows[0].get("null_held_out", ()) if rows else ():
                row = pooled(rows, learner, "null_held_out", 0)
                out["held_out"].append(
                    {"filter": name, "weights": f"{kind}, random selector", "learner": learner}
                    | (row or {})
                )
        rows = discrimination(own, twin, 0)
        out["discrimination"] += [{"filter": name, **row} for row in rows]
    out["labels"] = [
        {"site": r["site"], "head": r["head"], **r["more"]}
        for r in found["trained"] if r.get("more")
    ]  # fmt: skip
    out["feasible"] = [r["feasible"] for r in found["trained"] if r.get("feasible")]
    return out


def kept(name: str, settings: Any, run: Callable[[], Any], again: bool) -> Any:
    """What `run` gives, from the cache where it was run with these settings before."""
    root = Path(os.environ.get("ATTOSCOPE_CACHE") or Path.home() / ".cache" / "attoscope")
    key = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    path = root / "studies" / f"heads-{name.replace(', ', '-').replace(' ', '-')}-{key}.json"
    if path.exists() and not again:
        return json.loads(path.read_text())
    began = time.perf_counter()
    found = plain(run())
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(found))
    scratch.rename(path)
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return found


def study(parts: tuple[Part, ...], scale: str, again: bool = False) -> dict[str, Any]:
    """The whole study as plain data."""
    out: dict[str, Any] = {"scale": scale, "parts": {}}
    for part in parts:
        found = kept(part.name, part, lambda part=part: measured(part), again)
        rows = [_short(r, k) for k in ("trained", "fresh") for r in found[k]]
        heads = {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}
        out["parts"][part.name] = plain(tables(part, found)) | {"heads": heads}
    rank = RANK[scale]
    heads_ = kept(rank.name, rank, lambda: rank_records(rank), again)
    seeds, steps = TRAINING[scale]
    training = [
        kept(f"training {seed}", (seed, steps), lambda s=seed: followed(s, steps), again)
        for seed in range(seeds)
    ]
    return {**out, "rank": plain(rank_tables(rank, heads_)), "training": training}


def _short(record: dict[str, Any], kind: str) -> dict[str, Any]:
    """A head's numbers without its documents."""
    from studies.heads_summary import STATISTICS

    plain_ = {name: statistic(record) for name, statistic, _ in STATISTICS}
    place = {k: record[k] for k in ("site", "head", "filter", "queries")}
    return plain({"weights": kind, **place, **plain_})


def main() -> None:
    """Runs the study and writes what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer of everything, about 90 s")
    parser.add_argument("--again", action="store_true", help="run finished parts anew")
    parser.add_argument("--out", type=Path, default=DOCS, help="where figures and numbers go")
    given = parser.parse_args()
    torch.set_num_threads(1)
    scale = "quick" if given.quick else "full"
    found = study(QUICK if given.quick else FULL, scale, given.again)
    folder = given.out / "studies"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "heads.json").write_text(json.dumps(found, indent=None) + "\n")
    for path in figures.write(found, given.out):
        print(path)


if __name__ == "__main__":
    main()
