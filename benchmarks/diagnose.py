"""What a diagnosis costs: time as a ratio to the plain forward pass, and bytes of tensors.

    python -m benchmarks.diagnose [--json] [--quick] [--rounds N]

One process, one thread, the methods taking turns. Every ratio is the median over rounds of
(method's seconds / plain pass's seconds of the same round), with the range over rounds, and
beside it the same median in processor time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import json
import platform
import sys
from typing import Any

import torch
import transformers

from attoscope import __version__
from benchmarks.cases import Case, cases, feed, load
from benchmarks.methods import TITLES, Peer, methods
from benchmarks.peak import peaks
from benchmarks.timing import ratios, take_turns


def main() -> None:
    """Run everything and print a table, or the numbers with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--quick", action="store_true", help="MiniLM and short texts only")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 2 if asked.quick else asked.rounds
    result = {
        "versions": versions(),
        "rounds": rounds,
        "time": timed(cases(asked.quick), rounds),
        "peak": peaks((512, 1024)) if asked.quick else peaks(),
    }
    print(json.dumps(result, indent=2) if asked.json else in_markdown(result))


def versions() -> dict[str, str]:
    """What was measured with."""
    return {
        "attoscope": __version__,
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def timed(chosen: list[Case], rounds: int) -> list[dict[str, Any]]:
    """One record per case; a model is loaded once."""
    records, loaded = [], None
    for case in chosen:
        if loaded is None or loaded[0] != case.folder:
            loaded = (case.folder, *load(case.folder))
        _, subject, eager = loaded
        fed = feed(subject, case)
        subject.layout(fed[0])
        print(f"{case.name}, {case.tokens} tokens …", file=sys.stderr, flush=True)
        seconds = take_turns(methods(subject, Peer(eager), fed), rounds)
        records.append(
            {
                "model": case.name,
                "tokens": case.tokens,
                "documents": case.documents,
                "batch_size": case.batch_size,
                "methods": ratios(seconds),
            }
        )
    return records


def in_markdown(result: dict[str, Any]) -> str:
    """Two tables, as they stand in the documentation."""
    lines = [", ".join(f"{name} {text}" for name, text in result["versions"].items())]
    lines += [f"One thread, {result['rounds']} rounds.", "", "### Time", ""]
    heads = [f"{r['model']}, {r['tokens']:,} tokens" for r in result["time"]]
    lines += ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for name, title in TITLES.items():
        cells = [time_cell(name, record["methods"][name]) for record in result["time"]]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "### Bytes of tensors beyond the weights, at their peak", ""]
    names = ("plain", "measure", "measure_all_rows", "peer")
    lines.append("| tokens | " + " | ".join(TITLES[name] for name in names) + " |")
    lines.append("| --- |" + " --- |" * len(names))
    for row in result["peak"]:
        cells = [f"{row[name] / 2**20:.1f} MiB" for name in names]
        lines.append(f"| {row['tokens']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def time_cell(name: str, one: dict[str, float]) -> str:
    """Seconds for the plain pass; for the others ratio, range, and ratio of CPU time."""
    if name == "plain":
        return f"{one['seconds']:.2f} s"
    spread = f"{one['least']:.2f}–{one['largest']:.2f}; CPU {one['cpu_ratio']:.2f}"
    return f"**{one['ratio']:.2f}×** ({spread})"


if __name__ == "__main__":
    main()
