"""Papers made up for the tests, each with claims that come out in a known way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from attoscope.papers import Control, Evidence, Fails, Paper, Run


def paper(slug: str = "fake") -> Paper:
    """A paper without claims."""
    return Paper(slug, "A Made-up Paper", "A. Nobody", 2024, "https://arxiv.org/abs/0000.00000")


def walk(item: dict[str, Any]) -> dict[str, Any]:
    """A random walk; leaves its process in the item's log, where one is named."""
    if item.get("log"):
        with Path(item["log"]).open("a") as log:
            log.write(f"{os.getpid()}\n")
    if item.get("stop"):
        raise KeyboardInterrupt
    rng = np.random.default_rng(item["seed"])
    steps = rng.choice([-1.0, 1.0], size=(64, 64)) @ rng.normal(size=(64, 64))
    return {"end": steps.sum(), "path": np.cumsum(steps[0]), "shape": (64, 64)}


def threads(item: int) -> int:
    """How many threads linear algebra may use here."""
    return max(library["num_threads"] for library in threadpool_info())


def measured(end: float = 0.5) -> dict[str, Any]:
    return {"share": end, "undefined": float("nan"), "trials": np.int64(3)}


def evidence(holds: bool = True, fails: bool = True, **more: Any) -> Evidence:
    control = Control("labels shuffled", {"share": 0.1}, fails)
    return Evidence(measured(), holds, control, **more)


def chart() -> Any:
    import altair as alt

    rows = [{"step": i, "correlation": i / 6000} for i in range(6000)]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(x=alt.X("step:Q", title="step"), y=alt.Y("correlation:Q", title="correlation"))
    )


TEXTS = {"statement": "It is so.", "source": "Figure 1", "criterion": "share at least 0.4"}
REASON = Fails("the constant is wrong", "appendix B, redone")


def declared() -> Paper:
    """One claim that holds, one that is known not to, one that draws."""
    made = paper()
    made.claim(name="holding", **TEXTS)(lambda run: evidence(table=[{"trial": 1, "end": 0.5}]))
    made.claim(name="known-to-fail", expected=REASON, **TEXTS)(lambda run: evidence(False))
    made.claim(name="drawn", **TEXTS)(lambda run: evidence(figure=chart()))
    return made


def one(result: Evidence, expected: Any = None) -> Paper:
    """One claim with this evidence."""
    made = paper()
    more = {} if expected is None else {"expected": expected}
    made.claim(name="only", **TEXTS, **more)(lambda run: result)
    return made


def sweeping(log: Path | None = None, count: int = 6) -> Paper:
    """One claim that sweeps over random walks."""
    made = paper()

    @made.claim(name="sweep", **TEXTS)
    def sweep(run: Run) -> Evidence:
        seeds = run.rng("walks").integers(2**31, size=count).tolist()
        results = run.map(walk, [{"seed": s, "log": log and str(log)} for s in seeds], "walks")
        ends = {"ends": [r["end"] for r in results], "last": results[-1]["path"]}
        return Evidence(ends, True, Control("nothing moved", {"end": 0.0}, True))

    return made
