"""Measures the table "What is normal" of docs/diagnose.md: `python docs/normal.py`.

Needs the models and texts of requirements-demo.txt; takes a minute or two.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attoscope.diagnosing import diagnose
from attoscope.diagnosis import Diagnosis

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples import assets

PAGE = Path(__file__).parent / "diagnose.md"
TOKENS = 128
HEAD = (
    "| model | data | cosine at the input | largest | last block | final norm | effective rank "
    "share at the input | last block |\n" + "| --- " * 8 + "|"
)


def _articles() -> list[str]:
    return [path.read_text(encoding="utf-8", errors="replace") for path in assets.bbc(24)]


def _reactions() -> list[str]:
    return list(assets.REACTIONS)


def _digits() -> list[Any]:
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        return [Image.open(path).copy() for path in assets.digits(Path(folder), 32)]


Row = tuple[str, str, Callable[[], Path], Callable[[], list[Any]]]
MODELS: tuple[Row, ...] = (
    ("MiniLM-L6", "24 news articles", assets.minilm, _articles),
    ("SmolLM2-135M", "24 news articles", assets.smollm2, _articles),
    *(
        (f"rxnfp `{name}`", "16 reactions", partial(assets.reaction_bert, name), _reactions)
        for name in ("bert_pretrained", "bert_ft", "bert_ft_10k_25s")
    ),
    ("ViT for digits", "32 images", lambda: assets.VIT_DIGITS, _digits),
)


def row(name: str, data: str, found: Diagnosis) -> str:
    """One model's line: content tokens, mean over documents."""
    cosine, rank = found.readings["cosine"], found.readings["effective_rank_share"]
    points = [str(point).split(".")[-1] for point in cosine["point"].values]
    blocks = [i for i, point in enumerate(points) if point.isdigit()]
    values, ranks = np.asarray(cosine), np.asarray(rank)
    largest = max(blocks, key=lambda i: values[i])
    final = f"{values[points.index('final')]:.2f}" if "final" in points else "none"
    cells = (
        f"{values[points.index('in')]:.2f}",
        f"{values[largest]:.2f} (block {int(points[largest]) + 1} of {len(blocks)})",
        f"{values[blocks[-1]]:.2f}",
        final,
        f"{ranks[points.index('in')]:.2f}",
        f"{ranks[blocks[-1]]:.2f}",
    )
    return f"| {name} | {data} | {' | '.join(cells)} |"


def rows() -> Iterator[str]:
    """Each model measured in turn; what was found beyond notes goes to the terminal."""
    for name, data, where, read in MODELS:
        found = diagnose(where(), read(), max_tokens=TOKENS, null=False)
        print(name, [f"{f.id} ({f.severity})" for f in found.findings], file=sys.stderr)
        yield row(name, data, found)


if __name__ == "__main__":
    table = "\n".join([HEAD, *rows()])
    start, end = "<!-- measured: normal -->", "<!-- end: normal -->"
    page = PAGE.read_text(encoding="utf-8")
    made = re.sub(
        f"{start}.*?{end}", lambda _: f"{start}\n{table}\n{end}", page, flags=re.DOTALL
    )
    PAGE.write_text(made, encoding="utf-8")
    print(table)
