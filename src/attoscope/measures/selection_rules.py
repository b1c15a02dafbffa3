"""What the readings of attention give away: rules, with their thresholds and why these.

Thresholds come from what a number means, not from models that were looked at:

- *No choice*: a row of Gaussian scores with standard deviation s moves about 0.4 s of its
  attention away from the even spread (total variation). Below s = 0.05 that is two percent; the
  head is an average. On top, no key may reach twice its even share in 99 % of rows.
- *Saturated*: above the freezing point sqrt(2 ln n) the softmax of n random scores rests on a
  few keys. At c times that point the expected margin of the top key is c nats; at c = 3 it gets
  e^3 = 20 times the runner-up. Trained heads do live there (those that look at the token before),
  but can still be moved. So one row in ten must also have a runner-up that float32 cannot hold
  beside the top weight, where the gradient w (1 - w) is exactly 0 in any format that is used. A
  sink alone puts weight on one key without spreading scores; position biases (ALiBi) spread
  scores without a single key.
- *Dead*: a head that writes less than a thousandth of its layer's median head, or less than
  float32 rounding (1e-6) of the stream.
- *Sink*: 0.3 of the attention on one token, the threshold of Gu et al. 2024, and twice what even
  attention would put there (in a short text that is much).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attoscope.measures.places import parse
from attoscope.measures.rules import Book, Rule

EVEN_SCALE = 0.05
EVEN_ROWS = 0.99
FROZEN_TIMES = 3.0
LOST_ROWS = 0.1
DEAD_SHARE = 1e-3
DEAD_ABSOLUTE = 1e-6
SINK_SHARE = 0.3
EVEN_TIMES = 2.0

Cells = NDArray[np.bool_]


def not_finite(book: Book) -> Cells:
    """Rows that are not finite although the stream that enters the layer is."""
    reading = book.readings["non_finite_rows"]
    cells = reading.values > 0
    stream = book.readings.get("non_finite")
    if stream is None:
        return cells
    lost = {str(p) for p, v in zip(stream.coords["point"], stream.values, strict=True) if v > 0}
    stacks_lost = {parse(label).stack for label in lost}
    for i, label in enumerate(reading.coords["site"]):
        place = parse(str(label))
        before = "in" if place.index == "0" else str(int(place.index or 0) - 1)
        inherited = f"{place.stack}.{before}" in lost
        if place.call != "self":
            # What is attended to comes from another stack.
            inherited = inherited or bool(stacks_lost - {place.stack})
        if inherited:
            cells[i] = False
    return cells


def makes_no_choice(book: Book) -> Cells:
    """Scores differ by next to nothing, and no key ever gets twice its even share."""
    return (book.values("score_scale") < EVEN_SCALE) & (book.values("undecided") >= EVEN_ROWS)


def saturated(book: Book) -> Cells:
    """Scores spread far above the freezing point, and rows pass no gradient."""
    spread = book.values("score_scale") > FROZEN_TIMES * book.null("score_scale")
    return spread & (book.values("saturated") >= LOST_ROWS)


def dead(book: Book) -> Cells:
    """The head writes next to nothing, beside its layer's median head or beside the stream."""
    write = book.values("head_write")
    there = np.isfinite(write).any(1)
    median = np.full(len(write), np.nan)
    median[there] = np.nanmedian(write[there], axis=1)
    return (write < DEAD_SHARE * median[:, None]) | (write < DEAD_ABSOLUTE)


def sink(book: Book) -> Cells:
    """More than three tenths of the attention on the first token, and twice the even share."""
    share = book.values("first_share")
    return (share > SINK_SHARE) & (share > EVEN_TIMES * book.null("first_share"))


def special(book: Book) -> Cells:
    """More than three tenths on special tokens other than the first, and twice the even share."""
    share = book.values("special_share")
    others = share - book.values("first_share")
    return (others > SINK_SHARE) & (share > EVEN_TIMES * book.null("special_share"))


_LOOK_AT_WEIGHTS = """\
for path in $modules:
    for name, weight in model.get_submodule(path).named_parameters():
        print(path, name, tuple(weight.shape), f"std {weight.float().std().item():.2e}")
"""

RULES: tuple[Rule, ...] = (
    Rule(
        id="non_finite_scores",
        title="Attention scores are not finite",
        severity="severe",
        reading="non_finite_rows",
        fires=not_finite,
        scope="head",
        worst="largest",
        sentence="In {where}, {heads} {n:has|have} scores that are NaN or infinite, although "
        "what enters the layer is finite.",
        paper="attoscope's own check",
        remedy="Look for NaN in the query and key weights, and for an overflow of query times "
        "key in half precision. If the weights are sound, compute the scores in float32 or "
        "bfloat16, or normalise queries and keys (QK-norm).",
        code="""\
import torch

for path in $modules:
    for name, weight in model.get_submodule(path).named_parameters():
        if not torch.isfinite(weight).all():
            print(path, name, "is not finite: restore it from an earlier checkpoint")
model = model.to(torch.bfloat16)  # if the weights are sound and the model ran in float16
""",
    ),
    Rule(
        id="uniform_attention",
        title="Attention that makes no choice",
        severity="warning",
        reading="score_scale",
        fires=makes_no_choice,
        scope="layer",
        worst="smallest",
        sentence="In {where}, {heads} {n:makes|make} no choice: a query's scores differ by "
        "only {measured} nats between keys, so attention is an average over all of them.",
        paper="Noci et al. 2022 (arXiv 2206.03126): even attention starves queries and keys of "
        "gradient; Zhai et al. 2023 (arXiv 2303.06296)",
        remedy="Check that query and key weights were loaded (a name missing from the "
        "checkpoint leaves them at zero or at their initial values) and that they are "
        "trained (not frozen, and in the optimiser). Weights near zero pass each other no "
        "gradient: draw them afresh with a larger gain, then train on.",
        code=_LOOK_AT_WEIGHTS
        + """\
        if name.split(".")[0][0] in "qk" and weight.dim() == 2 and weight.std() < 1e-3:
            torch.nn.init.xavier_uniform_(weight)  # then train on
""",
        shown="decided",
    ),
    Rule(
        id="uniform_head",
        title="Heads that make no choice",
        severity="note",
        reading="score_scale",
        fires=makes_no_choice,
        scope="head",
        worst="smallest",
        sentence="{named} {n:makes|make} no choice: a query's scores differ by only {measured} "
        "nats between keys, so attention is an average over all of them.",
        paper="Zhai et al. 2023 (arXiv 2303.06296)",
        remedy="A head that averages is not wrong in itself. If it should choose, check that "
        "its query and key weights are loaded and trained.",
        code=_LOOK_AT_WEIGHTS,
        shown="decided",
        unless=("uniform_attention",),
    ),
    Rule(
        id="saturated_attention",
        title="Saturated attention",
        severity="warning",
        reading="score_scale",
        fires=saturated,
        scope="layer",
        worst="largest",
        sentence="In {where}, {heads} {n:is|are} saturated: scores spread by {measured} nats, "
        "where the softmax freezes onto a few keys at {null}, and for many "
        "queries no gradient passes at all.",
        paper="Zhai et al. 2023 (arXiv 2303.06296): entropy collapse",
        remedy="Bring the scores down: check the scale of attention (1 / sqrt(head size), "
        "once), lower the learning rate, and bound queries and keys by QK-norm or by "
        "reparametrising their weights with the spectral norm.",
        code="""\
import torch
from torch.nn.utils.parametrizations import spectral_norm

# sigma-Reparam: query and key weights divided by their largest singular value; then train on.
for path in $modules:
    for name, part in list(model.get_submodule(path).named_modules()):
        if isinstance(part, torch.nn.Linear) and name.split(".")[-1][0] in "qk":
            spectral_norm(part)
""",
        shown="decided",
    ),
    Rule(
        id="dead_head",
        title="Heads that write nothing",
        severity="warning",
        reading="head_write",
        fires=dead,
        scope="head",
        worst="smallest",
        sentence="{named} {n:writes|write} next to nothing into the stream: "
        "{measured:percent} of its norm, less than a thousandth of what the median head of "
        "the layer writes.",
        paper="Michel et al. 2019 (arXiv 1905.10650); Kobayashi et al. 2020 (arXiv 2004.10102)",
        remedy="Compare the norms of the head's rows of the value weight (and of its "
        "columns of the output weight) with those of its neighbours. Zeros mean that the "
        "checkpoint lost the head: reload it. If training drove it there, remove it, since "
        "nothing is lost, or draw it afresh and train on.",
        code="""\
for path, dead in $heads.items():
    for name, weight in model.get_submodule(path).named_parameters():
        heads = model.config.num_attention_heads
        if weight.dim() == 2 and weight.shape[0] % heads == 0:
            norms = weight.unflatten(0, (heads, -1)).flatten(1).norm(dim=1)
            print(path, name, "dead:", norms[dead].tolist(), "median:", norms.median().item())
""",
        shown="decided",
    ),
    Rule(
        id="attention_sink",
        title="Attention sinks",
        severity="note",
        reading="first_share",
        fires=sink,
        scope="head",
        worst="largest",
        sentence="In {where}, {heads} {n:puts|put} more than 30 % of {n:its|their} "
        "attention on the first token, and more than twice what even attention would: up to "
        "{measured:percent} against {null:percent}.",
        paper="Xiao et al. 2023 (arXiv 2309.17453); Gu et al. 2024 (arXiv 2410.10781); Barbero "
        "et al. 2025 (arXiv 2504.02732)",
        remedy="Usual in trained models, and no fault. Keep the first tokens whenever the "
        "cache is cut or a window slides, leave the first token out of averages over "
        "attention, and read `content_entropy` for what the head does with the rest.",
        code="""\
import torch

# A sliding cache that never drops the sink (keys: batch, head, token, size).
keys = torch.cat([keys[..., :4, :], keys[..., -window:, :]], dim=-2)
values = torch.cat([values[..., :4, :], values[..., -window:, :]], dim=-2)
""",
        shown="first",
    ),
    Rule(
        id="special_token_attention",
        title="Attention on special tokens",
        severity="note",
        reading="special_share",
        fires=special,
        scope="head",
        worst="largest",
        sentence="In {where}, {heads} {n:puts|put} more than 30 % of {n:its|their} "
        "attention on special tokens other than the first, and more than twice what even "
        "attention would: up to {measured:percent} against {null:percent}.",
        paper="Clark et al. 2019 (arXiv 1906.04341)",
        remedy="Usual in trained encoders: such heads rest there. Do not read those weights as "
        "importance; read `content_entropy`, which leaves special tokens out.",
        code="""\
resting = diagnosis.readings["special_share"] > 0.5
print(diagnosis.readings["content_entropy"].where(resting).to_pandas())
""",
        shown="special",
    ),
)
