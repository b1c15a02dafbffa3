"""The models and batches of the benchmark: real weights, real text, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attoscope.trace import Batch, Subject, batches
from examples import assets

# Documents are numbered from here, as in the middle of a long run: the first two documents of a
# run always get a null pass, later on it is one in four.
FIRST_DOCUMENT = 8
TOPIC = "politics"


@dataclass(frozen=True)
class Case:
    """One model at one length."""

    name: str
    folder: Path
    tokens: int
    documents: int
    batch_size: int


def cases(quick: bool) -> list[Case]:
    """MiniLM at 128 and 512 tokens, SmolLM2 at 128 and 1,024; `quick` leaves SmolLM2 out."""
    minilm = assets.minilm()
    chosen = [Case("MiniLM", minilm, 128, 16, 8), Case("MiniLM", minilm, 512, 8, 8)]
    if quick:
        return chosen
    smollm2 = assets.smollm2()
    return [
        *chosen,
        Case("SmolLM2", smollm2, 128, 16, 8),
        Case("SmolLM2", smollm2, 1024, 4, 4),
    ]


def load(folder: Path) -> tuple[Subject, Any]:
    """The model as it stands, in float32, and the same with eager attention for the peer."""
    subject = Subject.load(folder, dtype="float32")
    eager = type(subject.model).from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    )
    return subject, eager.eval()


def feed(subject: Subject, case: Case) -> list[Batch]:
    """Full-length batches: articles of one topic are joined until a document is long enough."""
    made = batches(subject, documents(case), max_tokens=case.tokens, batch_size=case.batch_size)
    numbered = [
        replace(batch, documents=tuple(number + FIRST_DOCUMENT for number in batch.documents))
        for batch in made
    ]
    for batch in numbered:
        if batch.valid is None or not bool(batch.valid.all()):
            raise RuntimeError(f"{case.name}: a document is shorter than {case.tokens} tokens")
    return numbered


def documents(case: Case) -> Sequence[str]:
    """Texts of at least eight characters per token wanted."""
    articles = iter(assets.bbc(400, TOPIC))
    texts = []
    for _ in range(case.documents):
        text = ""
        while len(text) < 8 * case.tokens:
            text += next(articles).read_text(encoding="latin-1") + "\n"
        texts.append(text)
    return texts
