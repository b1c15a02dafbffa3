"""Do the readings show that a run diverges or collapses before its loss does?

    python -m studies.divergence            eight settings, five seeds each
    python -m studies.divergence --quick    two seeds

Small language models over the bytes of news articles are trained on the CPU and watched every
fifth step. Writes docs/divergence-loss.svg, docs/divergence-lead.svg and
docs/studies/divergence.json (with --quick: into .cache/divergence/quick). Finished runs are kept
in .cache/divergence; delete it to start afresh.

The settings were found by trying; which rules were fixed when is said in docs/divergence.md. *The
loss shows it, alone*: the mean loss of the last 20 steps is 0.2 nats above the lowest such mean so
far. *The loss shows it, beside healthy runs*: it is 0.2 nats above the highest healthy run at
that step, and stays so. A reading warns alone by the rules of `attoscope.monitor.alarms`; beside
healthy runs when, in three looks in a row, it is outside what all healthy runs had at that look by
a factor of two (shares: by 0.2), having been inside before. A healthy run is held against the
others, without itself. Warnings before anything is wrong do not count.
"""

# ruff: noqa: E402
# One thread has to be asked for before torch is imported.
from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from joblib import Parallel, delayed
from torch import Tensor, nn

from attoscope.monitor import JUMPS, LIMITS, watch
from examples import assets

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVERY, WINDOW, NATS, IN_A_ROW = 400, 5, 20, 0.2, 3
WIDTH, HEADS, LAYERS, TOKENS, BATCH, SYMBOLS = 32, 4, 4, 32, 16, 128
SHARES = ("normalised_entropy", "least_entropy", "undecided", "saturated", "saturated_heads")
SKIPPED = ("step", "passes", "alarms", "non_finite", "gradient_mean", "loss")


@dataclass(frozen=True)
class Setting:
    """How a run is trained; `doubling` steps double the rate after step 100, `cliff` times 100."""

    name: str
    kind: str
    what: str
    rate: float = 1e-3
    warmup: int = 50
    post_norm: bool = False
    skip: float = 1.0
    clip: float = 1.0
    doubling: int = 0
    cliff: int = 0

    @property
    def begins(self) -> int:
        """The step at which something is wrong: what warns before it does not count."""
        return self.cliff or (100 if self.doubling else 0)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step."""
        rate = self.rate * (min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0)
        if self.doubling:
            rate *= 2 ** (max(0, step - 100) / self.doubling)
        return rate * (100.0 if self.cliff and step >= self.cliff else 1.0)


SETTINGS = (
    Setting("pre-norm", "healthy", "learning rate 1e-3, warm-up over 50 steps"),
    Setting("post-norm", "healthy", "the same, warm-up over 100", warmup=100, post_norm=True),
    Setting("brave", "healthy", "pre-norm at ten times the rate", rate=1e-2),
    Setting("rate grows", "diverges", "the rate doubles every 20 steps from step 100 on, gradients "
            "not clipped", doubling=20, clip=0.0),
    Setting("rate grows, clipped", "diverges", "the same, gradients clipped at norm 1",
            doubling=20),
    Setting("rate jumps", "diverges", "the rate is 100 times as large from step 200 on, gradients "
            "not clipped", cliff=200, clip=0.0),
    Setting("weak skip", "collapses", "skip connections carry a fifth of the stream", skip=0.2),
    Setting("hot start", "collapses", "rate 0.1 without warm-up or clipping", rate=0.1, warmup=0,
            clip=0.0),
)  # fmt: skip


class Block(nn.Module):
    """Attention and a perceptron, normalised before (or after) each."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.post, self.skip = setting.post_norm, setting.skip
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        wide = 4 * WIDTH
        self.mlp = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        parts = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, (self.attend, self.mlp), strict=True):
            if self.post:
                x = norm(self.skip * x + part(x))
            else:
                x = self.skip * x + part(norm(x))
        return x


class Model(nn.Module):
    """A decoder over bytes."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block(setting) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> Tensor:
    """The ASCII bytes of 300 news articles."""
    joined = b"\n".join(path.read_bytes() for path in assets.bbc(300))
    symbols = np.frombuffer(joined, np.uint8)
    return torch.from_numpy(symbols[symbols < SYMBOLS].astype(np.int64))


def train(setting: Setting, seed: int) -> dict[str, Any]:
    """One run: losses, rows and alarms; kept once finished."""
    kept = ROOT / ".cache" / "divergence" / f"{setting.name.replace(' ', '-')}-{seed}.json"
    mark = {"setting": asdict(setting), "steps": STEPS}
    if kept.exists() and (old := json.loads(kept.read_text()))["mark"] == mark:
        return old
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, data = Model(setting).train(), text()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
    draw = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    with watch(model, EVERY) as log:
        for step in range(STEPS):
            at = torch.randint(len(data) - TOKENS - 1, (BATCH, 1), generator=draw)
            x = data[at + torch.arange(TOKENS + 1)]
            loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            losses.append(loss.item())
            loss.backward()
            log.gradients()
            if setting.clip:
                nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
            optimizer.param_groups[0]["lr"] = setting.rate_at(step)
            optimizer.step()
            optimizer.zero_grad()
    alarms: dict[str, list[int]] = {}
    for alarm in log.alarms:
        alarms.setdefault(alarm.rule, []).append(alarm.step)
    result = {
        "mark": mark, "name": setting.name, "kind": setting.kind, "seed": seed, "losses": losses,
        "alarms": alarms, "readings": extremes(log.rows),
    }  # fmt: skip
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.with_suffix(".part").write_text(json.dumps(result))
    kept.with_suffix(".part").replace(kept)
    return result


def extremes(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Per reading, its largest and its smallest value over the layers, at each look."""
    found: dict[str, list[float]] = {}
    for i, row in enumerate(rows):
        by_name: dict[str, list[float]] = {}
        for key, value in row.items():
            name = key.partition("/")[0]
            if name not in SKIPPED and math.isfinite(value):
                by_name.setdefault(name, []).append(value)
        for name, values in by_name.items():
            for label, pick in (("largest", max), ("smallest", min)):
                series = found.setdefault(f"{name}, {label}", [math.nan] * len(rows))
                series[i] = pick(values)
    return found


def smooth(losses: list[float]) -> np.ndarray:
    """Mean of the last `WINDOW` losses at each step from `WINDOW` - 1 on; infinite if one is."""
    values = np.nan_to_num(np.array(losses), nan=np.inf)
    return np.lib.stride_tricks.sliding_window_view(values, WINDOW).mean(1)


def shown_alone(run: dict[str, Any]) -> int | None:
    """First step at which the loss shows it by itself."""
    mean = smooth(run["losses"])
    above = mean > np.minimum.accumulate(mean) + NATS
    return int(above.argmax()) + WINDOW - 1 if above.any() else None


def shown_beside(run: dict[str, Any], healthy: list[dict[str, Any]]) -> int | None:
    """First step from which the loss stays above all healthy runs."""
    highest = np.max([smooth(other["losses"]) for other in healthy], 0)
    below = np.flatnonzero(smooth(run["losses"]) <= highest + NATS)
    start = int(below[-1]) + 1 if len(below) else 0
    return start + WINDOW - 1 if start < STEPS - WINDOW + 1 else None


def warned_alone(rule: str, run: dict[str, Any]) -> int | None:
    """First alarm of a rule, from the step on at which something is wrong."""
    begins = Setting(**run["mark"]["setting"]).begins
    return next((step for step in run["alarms"].get(rule, []) if step >= begins), None)


def warned_beside(
    series: str, run: dict[str, Any], healthy: list[dict[str, Any]]
) -> int | None:
    """First look that ends three in a row outside all healthy runs, after one inside.

    What is outside from the start is how the model was built, and no sign of what happens to it.
    """

    def scaled(one: dict[str, Any]) -> np.ndarray:
        values = np.array(one["readings"].get(series, [math.nan] * (STEPS // EVERY)))
        name = series.partition(",")[0]
        if name in SHARES:
            return values / NATS
        if name == "cosine":
            values = 1.0 - values
        return np.log2(np.maximum(values, 1e-12))

    others = np.array([scaled(other) for other in healthy])
    mine = scaled(run)
    outside = (mine > others.max(0) + 1) | (mine < others.min(0) - 1) | np.isnan(mine)
    count, been_inside = 0, False
    for look, out in enumerate(outside):
        been_inside |= not out
        count = count + 1 if out and been_inside else 0
        if count == IN_A_ROW and look * EVERY >= Setting(**run["mark"]["setting"]).begins:
            return look * EVERY
    return None


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Leads and false alarms of every rule and reading."""
    healthy = [run for run in runs if run["kind"] == "healthy"]
    rules = [rule.name for rule in (*LIMITS, *JUMPS)]
    series = sorted({name for run in healthy for name in run["readings"]})
    records = []
    for run in runs:
        others = [other for other in healthy if other is not run]
        records.append(
            {
                "name": run["name"], "kind": run["kind"], "seed": run["seed"],
                "final_loss": float(smooth(run["losses"])[-1]),
                "loss_alone": shown_alone(run), "loss_beside": shown_beside(run, others),
                "alone": {rule: warned_alone(rule, run) for rule in rules},
                "beside": {name: warned_beside(name, run, others) for name in series},
            }
        )  # fmt: skip
    return {
        "runs": records,
        "alone": summary(records, "alone", rules),
        "beside": summary(records, "beside", series),
    }


def summary(records: list[dict[str, Any]], how: str, names: list[str]) -> dict[str, Any]:
    """Per rule: false alarms, and per unhealthy setting how many were warned of and how early."""
    healthy = [r for r in records if r["kind"] == "healthy"]
    table: dict[str, Any] = {}
    for name in names:
        row: dict[str, Any] = {
            "false_alarms": sum(r[how][name] is not None for r in healthy),
            "healthy_runs": len(healthy),
        }
        for setting, mine in unhealthy(records):
            leads = [lead for r in mine if (lead := lead_of(r, how, name)) is not None]
            row[setting] = {
                "warned": sum(lead > 0 for lead in leads),
                "runs": len(mine),
                "median_lead": median(leads) if leads else None,
                "least_lead": min(leads, default=None),
            }
        table[name] = row
    return table


def unhealthy(records: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Runs that really went wrong, by setting: those whose loss shows it by either rule."""
    for setting in SETTINGS:
        if setting.kind != "healthy":
            mine = [r for r in records if r["name"] == setting.name]
            yield setting.name, [r for r in mine if shown(r) is not None]


def shown(record: dict[str, Any]) -> int | None:
    """The earlier of the two steps at which the loss shows it."""
    steps = [s for s in (record["loss_alone"], record["loss_beside"]) if s is not None]
    return min(steps, default=None)


def lead_of(record: dict[str, Any], how: str, name: str) -> int | None:
    """Steps between the warning and the loss; negative when the loss is first."""
    step, loss = record[how][name], shown(record)
    return None if step is None or loss is None else loss - step


def draw(runs: list[dict[str, Any]], result: dict[str, Any], folder: Path) -> None:
    """Losses of all runs; and the leads of the rules."""
    import altair as alt

    points, marks = [], []
    for run, record in zip(runs, result["runs"], strict=True):
        mean = smooth(run["losses"])
        name = f"{run['name']} ({run['kind']})"
        points += [
            {
                "setting": name,
                "seed": run["seed"],
                "step": i + WINDOW - 1,
                "loss": min(float(v), 8),
            }
            for i, v in enumerate(mean)
            if i % 5 == 0
        ]
        if run["kind"] != "healthy" and shown(record) is not None:
            marks.append({"setting": name, "step": shown(record)})
    line = alt.Chart().mark_line(strokeWidth=1).encode(
        x=alt.X("step:Q", title="training step"),
        y=alt.Y("loss:Q", title="loss, nats",
                scale=alt.Scale(zero=False)),
        detail="seed:N",
    )  # fmt: skip
    tick = alt.Chart().mark_rule(color="#c0392b", strokeDash=[3, 3], opacity=0.6)
    tick = tick.encode(x="step:Q").transform_filter("datum.mark")
    values = [p | {"mark": False} for p in points] + [m | {"mark": True} for m in marks]
    order = [f"{s.name} ({s.kind})" for s in SETTINGS]
    whole = alt.layer(line.transform_filter("!datum.mark"), tick, data=alt.Data(values=values))
    whole = whole.properties(width=190, height=120).facet(
        facet=alt.Facet("setting:N", sort=order, title=None), columns=4
    )
    whole.properties(
        title="Loss per byte, mean of 20 steps; dashed: it shows that something is wrong"
    ).save(folder / "divergence-loss.svg")
    leads = [
        {"setting": r["name"], "rule": rule, "lead": lead_of(r, "alone", rule),
         "kind": "limit" if rule in {limit.name for limit in LIMITS} else "jump"}
        for r in result["runs"] if r["kind"] != "healthy"
        for rule in result["alone"] if lead_of(r, "alone", rule) is not None
    ]  # fmt: skip
    dots = alt.Chart().mark_circle(size=40, opacity=0.6).encode(
        x=alt.X("lead:Q", title="steps of warning"),
        y=alt.Y("rule:N", title=None),
        color=alt.Color("kind:N", title="rule"),
    )  # fmt: skip
    zero = alt.Chart().mark_rule(color="#888").encode(x=alt.datum(0))
    chart = alt.layer(zero, dots, data=alt.Data(values=leads)).properties(width=210, height=230)
    names = [s.name for s in SETTINGS if s.kind != "healthy"]
    chart.facet(
        facet=alt.Facet("setting:N", sort=names, title=None), columns=3
    ).properties(title="First alarm of each rule, in steps before the loss shows it").save(
        folder / "divergence-lead.svg"
    )  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Both tables, as they stand in the documentation."""
    for how in ("alone", "beside"):
        names = [name for name, _ in unhealthy(result["runs"])]
        print(f"\n| {how} | false alarms | " + " | ".join(names) + " |")
        print("| --- |" + " --- |" * (len(names) + 1))
        for rule, row in result[how].items():
            cells = [f"{row['false_alarms']} of {row['healthy_runs']}"]
            for name in names:
                cell = row[name]
                early = "" if cell["median_lead"] is None else f", {cell['median_lead']:+.0f}"
                cells.append(f"{cell['warned']} of {cell['runs']}{early}")
            print(f"| `{rule}` | " + " | ".join(cells) + " |")


def main() -> None:
    """Train what is not kept, judge, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds instead of five")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    asked = parser.parse_args()
    seeds = range(2 if asked.quick else 5)
    pairs = [(setting, seed) for seed in seeds for setting in SETTINGS]
    runs = Parallel(n_jobs=asked.jobs, verbose=5)(delayed(train)(*pair) for pair in pairs)
    result = {"steps": STEPS, "every": EVERY, "seeds": len(seeds), **judge(runs)}
    folder = ROOT / ".cache" / "divergence" / "quick" if asked.quick else ROOT / "docs"
    (folder / "studies").mkdir(parents=True, exist_ok=True)
    (folder / "studies" / "divergence.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(runs, result, folder)
    show(result)


if __name__ == "__main__":
    main()
