"""What the smoothness readings give away: rules, with their thresholds and why these.

Similar tokens (a high cosine) are no fault as such: classification with mean pooling wants them.

- *Collapsed*: the rank-one residual is below 2^-7, the spacing of bfloat16 numbers at 1. What
  tells tokens apart is then below the rounding of the format that most models run in. Where one
  channel drowns all others, every token lies near that axis; the residual is then compared with
  what that channel leaves, sqrt(1 - its share), since the channel is a fault of its own. Tokens
  on one line point the same way (*rank collapse*), or both ways (*sign collapse*): Dovonon et
  al. 2024 tell rank collapse from the convergence of angles. Neither, where a single long token
  holds all the energy: the others then do not lie on its line.
- *Over-smoothed*: Gong et al. 2021 call a 24-layer DeiT-Base over-smoothed that ends at a mean
  cosine of about 0.9; what rounds to that counts. It has to hold over the last two blocks and
  the final norm, and to have come with depth: what tells tokens apart, 1 - cosine, is at most
  half of what it was at the input, and so is the effective rank (one bit of the spectrum's
  entropy). The channel's part in the cosine is taken off. Where one block alone lengthens the
  mean by more than half of what it takes, it is no smoothing but a massive mean (Sun et al.
  2024: massive activations appear at once).
- *Blow-up*: three blocks in a row (why three, and why not the first: see `exploding_stream`) in
  which the differences between tokens double, or, where a norm holds their size, double beside the
  mean while they do not shrink; over the run they more than double beside the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from attoscope.measures.base import Array, Reading
from attoscope.measures.places import Place, join, parse
from attoscope.measures.rules import Book, Rule
from attoscope.measures.stream_rules import DOUBLING, IN_A_ROW
from attoscope.measures.words import Number

BF16_SPACING = 2.0**-7
# 0.9, to the one digit that its source gives.
ALIKE = 0.85
HALF = 0.5
LAST_BLOCKS = 2
# Below this in size a margin is neither (as in `attoscope.prediction.spectra`); layers named.
UNDECIDED = 0.01
MOST_LAYERS = 3

Cells = NDArray[np.bool_]


def _places(reading: Reading) -> list[Place]:
    return [parse(str(label)) for label in reading.coords[reading.dims[0]]]


def _tracks(reading: Reading) -> Iterator[list[int]]:
    """Rows of each stack, in order of depth."""
    rows: dict[str, list[int]] = {}
    for i, place in enumerate(_places(reading)):
        rows.setdefault(place.track, []).append(i)
    yield from rows.values()


def _channel(book: Book, like: Reading) -> Array:
    """Share of the largest channel, 0 where it was not read."""
    if "channel_share" not in book.readings:
        return np.zeros_like(like.values)
    return np.asarray(np.nan_to_num(book.values("channel_share", like=like)))


def _on_a_line(book: Book) -> Cells:
    reading = book.readings["rank_one_residual"]
    left = np.sqrt(1 - _channel(book, reading))
    return np.asarray(reading.values < BF16_SPACING * left)


def collapsed(book: Book) -> Cells:
    """Content tokens lie on one line through the origin, to within bfloat16, on one side of it."""
    return np.asarray(_on_a_line(book) & (book.values("cosine") >= ALIKE))


def sign_collapsed(book: Book) -> Cells:
    """Content tokens lie on one line through the origin, to within bfloat16, on both its sides."""
    absolute = book.values("absolute_cosine") >= ALIKE
    return np.asarray(_on_a_line(book) & absolute & (book.values("cosine") < ALIKE))


def _without_channel(book: Book) -> Array:
    """Mean cosine less the part of the largest channel: (c - s) / (1 - s) where it holds s.

    Exact where the channel has the same sign and share at every token.
    """
    reading = book.readings["cosine"]
    share = _channel(book, reading)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(share < 1, (reading.values - share) / (1 - share), np.nan)


def _parts(book: Book) -> tuple[Array, Array] | None:
    """Sizes of what tokens share and of what tells them apart; None without the norm."""
    if "norm" not in book.readings:
        return None
    like = book.readings["dirichlet_energy"]
    norm = book.values("norm", like=like)
    return norm * np.sqrt(1 - like.values), norm * np.sqrt(like.values)


def _steps(sizes: Array, track: Sequence[int]) -> Array:
    """Logarithm of the growth from each point of a track to the next."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.diff(np.log(sizes[list(track)]))


def over_smoothed(book: Book) -> Cells:
    """Content tokens became nearly parallel with depth and stay so, and lost half their rank."""
    reading = book.readings["cosine"]
    cosine, places = _without_channel(book), _places(reading)
    rank = book.values("effective_rank_share")
    line = _on_a_line(book)
    cells = np.zeros(reading.values.shape, bool)
    for track in _tracks(reading):
        run = _last_run(cosine >= ALIKE, track)
        first, blocks = track[0], [i for i in run if places[i].index.isdigit()]
        if len(blocks) < LAST_BLOCKS or line[run].any():
            continue
        last = blocks[-1]
        apart = 1 - cosine[last] <= HALF * (1 - cosine[first])
        if apart and rank[last] <= HALF * rank[first] and not _massive(book, track, last):
            cells[run] = True
    return cells


def _last_run(cells: Cells, track: Sequence[int]) -> list[int]:
    """The run of true cells that reaches the end of the track."""
    run: list[int] = []
    for i in reversed(track):
        if not cells[i]:
            break
        run.insert(0, i)
    return run


def _massive(book: Book, track: Sequence[int], last: int) -> bool:
    """The mean's growth in one block, beyond that of the differences, is more than half of all
    by which it outgrew them from the input on (in logarithms)."""
    parts = _parts(book)
    if parts is None:
        return False
    seen = track[: track.index(last) + 1]
    shared, apart = (_steps(part, seen) for part in parts)
    jumps = shared - np.maximum(apart, 0.0)
    return bool(jumps.max() > HALF * (shared - apart).sum())


def blown_up(book: Book) -> Cells:
    """Differences between tokens grow geometrically over blocks, and their mean does not."""
    reading = book.readings["frequency_ratio"]
    cells, parts = np.zeros(reading.values.shape, bool), _parts(book)
    if parts is None:
        return cells
    places, double = _places(reading), np.log(DOUBLING)
    for track in _tracks(reading):
        ratio, apart = _steps(reading.values, track), _steps(parts[1], track)
        run: list[int] = []
        gained = 0.0
        for i, more, larger in zip(track[1:], ratio, apart, strict=True):
            later = places[i].index.isdigit() and places[i].index != "0"
            if not (later and larger > 0 and max(more, larger) > double):
                run, gained = [], 0.0
                continue
            run, gained = [*run, i], gained + float(more)
            if len(run) >= IN_A_ROW and gained > double:
                cells[run] = True
    return cells


def alike_or_on_a_line(book: Book, rows: Sequence[int]) -> str:
    """Which kind of collapse: all tokens equal, or of different lengths."""
    differ = book.values("dirichlet_energy")[list(rows)]
    cosine = Number(float(np.nanmean(book.values("cosine")[list(rows)])))
    if np.nanmax(np.sqrt(differ)) < BF16_SPACING:
        return f"they are all but equal (mean cosine {cosine})"
    return f"they differ in length only (mean cosine {cosine})"


def both_cosines(book: Book, rows: Sequence[int]) -> str:
    """Absolute and signed cosine, which part where signs are mixed."""
    absolute, signed = (
        Number(float(np.nanmean(book.values(name)[list(rows)])))
        for name in ("absolute_cosine", "cosine")
    )
    return f"mean |cosine| {absolute}, mean cosine {signed}"


def since_the_input(book: Book, rows: Sequence[int]) -> str:
    """Cosine at the input and just before the run, and the effective rank then and now."""
    reading, rank = book.readings["cosine"], book.values("effective_rank_share")
    places = _places(reading)
    track = next(track for track in _tracks(reading) if rows[0] in track)
    first, last = track[0], [i for i in track if places[i].index.isdigit()][-1]
    start = f"it was {Number(float(reading.values[first]))} at {places[first].words}"
    before = track[track.index(rows[0]) - 1]
    if before != first:
        start += (
            f" and still {Number(float(reading.values[before]))} after {places[before].words}"
        )
    then, now = Number(float(rank[first])), Number(float(rank[last]))
    return (
        f"{start}. The directions that tokens use fell from {then:percent} of the possible to "
        f"{now:percent}"
    )


def since_the_input_and_why(book: Book, rows: Sequence[int]) -> str:
    """The same, and what the spectra of attention say of these layers, where they were read."""
    spectra = by_their_spectra(book, rows)
    return since_the_input(book, rows) + (f". {spectra}" if spectra else "")


def by_their_spectra(book: Book, rows: Sequence[int]) -> str:
    """Heads of these layers whose margin smooths, beside random maps, and the largest margins."""
    if "smoothing_margin" not in book.readings:
        return ""
    margin, here = book.readings["smoothing_margin"], _places(book.readings["cosine"])
    labels, track = {here[row].label for row in rows}, here[rows[0]].track
    places = _places(margin)
    known = np.asarray(np.isfinite(margin.values).any(1))
    mine = [i for i, place in enumerate(places) if place.label in labels and known[i]]
    if not mine:
        return ""
    heads = margin.values[mine][np.isfinite(margin.values[mine])]
    smooth = int((heads > UNDECIDED).sum())
    mean = Number(float(heads.mean()))
    text = (
        f"By their spectra {smooth} of the {heads.size} heads of these layers smooth (mean margin "
        f"{mean}"
    )
    null = book.null("smoothing_margin")[mine]
    if np.isfinite(null).any():
        text += f"; random maps of the same norms: {Number(float(np.nanmean(null)))}"
    stack = [i for i, place in enumerate(places) if place.track == track and known[i]]
    means = {i: float(np.nanmean(margin.values[i])) for i in stack}
    top = sorted(sorted(stack, key=lambda i: -means[i])[:MOST_LAYERS])
    named = join([f"{places[i].words} ({Number(means[i])})" for i in top])
    return f"{text}); of the whole stack the margin is largest in {named}"


def differences_and_mean(book: Book, rows: Sequence[int]) -> str:
    """By how much the differences between tokens and their mean grew over the run."""
    reading, parts = book.readings["frequency_ratio"], _parts(book)
    track = next(track for track in _tracks(reading) if rows[0] in track)
    before = track[track.index(rows[0]) - 1]
    start = Number(float(reading.values[before]))
    if parts is None:
        return f"compared with the mean, they went from {start}"
    shared, apart = (Number(float(part[rows[-1]] / part[before])) for part in parts)
    return f"they grew {apart} times while the mean grew {shared} times, and went from {start}"


_NEUTRENO = """\
import attoscope

attoscope.treat(model, "neutreno", strength=0.4)  # then train on; .undo() takes it back
"""

RULES: tuple[Rule, ...] = (
    Rule(
        id="rank_collapse",
        title="Tokens collapsed onto one direction",
        severity="severe",
        reading="rank_one_residual",
        fires=collapsed,
        scope="run",
        worst="smallest",
        sentence="After {where}, content tokens can no longer be told apart: they point the "
        "same way, off which is only {measured:percent} of their norm, and {extra}.",
        paper="Dong et al. 2021 (arXiv 2103.03404): rank collapse; Nguyen et al. 2023, "
        "NeuTRENO (arXiv 2312.00751); Dovonon et al. 2024 (arXiv 2401.04301)",
        remedy="Look at the first of these layers: a skip connection that is missing or "
        "scaled away, a norm whose weights are zero, or attention that averages "
        "everything. Where all is as it should be, tie values to those of the first layer "
        "(NeuTRENO) and train on; from scratch, also scale residual branches by 1 / sqrt(2 × "
        "layers). A penalty on the cosine between tokens prevents this and cannot undo it: "
        "where tokens are equal, its gradient is 0.",
        code=_NEUTRENO,
        extra=alike_or_on_a_line,
    ),
    Rule(
        id="sign_collapse",
        title="Tokens collapsed onto one line, with both signs",
        severity="severe",
        reading="rank_one_residual",
        fires=sign_collapsed,
        scope="run",
        worst="smallest",
        sentence="After {where}, content tokens differ in nothing but sign and length: they lie "
        "on both sides of one line, off which is only {measured:percent} of their norm "
        "({extra}).",
        paper="Dovonon et al. 2024 (arXiv 2401.04301): rank collapse without convergence of "
        "angles, where an eigenvalue other than attention's largest one wins; Dong et al. 2021 "
        "(arXiv 2103.03404)",
        remedy="The mean cosine does not show this, and a loss that lowers it does not help: "
        "contrastive losses may even lead here. Look for a layer whose value and output "
        "weights stretch one direction far more than all others, or that cut the skip "
        "connection. Then tie values to those of the first layer (NeuTRENO), which brings back "
        "what told tokens apart there, or penalise the absolute cosine before it gets this far.",
        code=_NEUTRENO
        + """\

# Against it from the start of training: the absolute cosine, which sees both signs.
from attoscope.remedies import BlockTokens, cosine_loss

with BlockTokens(model) as tokens:
    loss = model(**batch).loss + cosine_loss(tokens.last, absolute=True)
""",
        extra=both_cosines,
    ),
    Rule(
        id="over_smoothing",
        title="Over-smoothing: tokens become nearly parallel",
        severity="warning",
        reading="cosine",
        fires=over_smoothed,
        scope="run",
        worst="largest",
        sentence="After {where}, content tokens are nearly parallel, with a mean cosine of up to "
        "{measured}; {extra}.",
        paper="Gong et al. 2021 (arXiv 2104.12753): a 24-layer DeiT-Base that ends at about "
        "0.9; Wang et al. 2022 (arXiv 2203.05962); Nguyen et al. 2023, NeuTRENO (arXiv "
        "2312.00751)",
        remedy="Alike is not bad by itself, and a classifier that averages its tokens wants "
        "it: look at the loss before and after. `attoscope predict` shows for each layer what its "
        "spectra foresee beside what it did. A pretrained model that is to be fine-tuned: "
        "try NeuTRENO first, since it adds no weights and stays nearest to the ones that are "
        "there, and judge it after training on; where the model must not change, add a penalty "
        "on the cosine to the loss of fine-tuning. From scratch: NeuTRENO or the penalty from "
        "the first step on, or value maps that sharpen (`attoscope.treat(model, "
        '"spectral", mode="sharpen")`), which change too much for weights that were trained '
        "without.",
        code=_NEUTRENO
        + """\

# Or leave the model as it is, and add a penalty to its loss.
from attoscope.remedies import BlockTokens, cosine_loss

with BlockTokens(model) as tokens:
    loss = model(**batch).loss + cosine_loss(tokens.last)
""",
        extra=since_the_input_and_why,
    ),
    Rule(
        id="sharpening_blow_up",
        title="Differences between tokens explode",
        severity="warning",
        reading="frequency_ratio",
        fires=blown_up,
        scope="run",
        worst="largest",
        sentence="Over {where}, the differences between tokens explode: {extra} to "
        "{measured} times its length.",
        paper="Dovonon et al. 2024 (arXiv 2401.04301): sharpening; Nguyen et al. 2023, "
        "NeuTRENO (arXiv 2312.00751), stable while its strength is below 1 + the smallest "
        "eigenvalue of attention (attoscope's derivation)",
        remedy="A norm in front of a branch keeps what it adds bounded: look for blocks that "
        "lack one, or whose norm, value, output or MLP weights are far larger than in the "
        "blocks before. Without norms NeuTRENO above its limit, 1 + the smallest eigenvalue of "
        "attention, does this by itself: undo it, and treat again with a smaller strength (0.4 "
        "to 0.6 are published). Where value and output weights are the cause (`attoscope "
        "predict` shows their eigenvalues), bring those into [-1, 0] and train on.",
        code="""\
import attoscope

print(attoscope.predict(model))  # the spectrum of each layer, and what follows from it
attoscope.treat(model, "spectral", mode="sharpen")  # eigenvalues in [-1, 0]; .undo() undoes
""",
        extra=differences_and_mean,
    ),
)
