"""Smoothing of a live model: what spectra say of every head, and what each layer really did.

Per head: the spectra of its value-output map and of its attention map, and which product of
eigenvalues wins. Per layer: how attention's update, and the rest of the block, change the
likeness of the tokens. For the stack: the stream carried forward by attention alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.measures.base import Array, Reading, Spec
from attoscope.measures.tally import Tally
from attoscope.measuring import Span, take
from attoscope.prediction.carried import Carried
from attoscope.prediction.documents import (
    MOST_TOKENS,
    Document,
    cut,
    documents_of,
    high_and_low,
    log_ratio,
)
from attoscope.prediction.heads import HeadMap, head_maps, random_asymmetry, uniform_spectrum
from attoscope.prediction.maps import Maps, ValueMaps, value_maps
from attoscope.prediction.specs import DC_SHARE, HEADS, LAYERS
from attoscope.prediction.spectra import attention_spectrum
from attoscope.prediction.stacks import operator_dc_share
from attoscope.trace.subject import Subject
from attoscope.trace.types import AttentionCall, Batch, Layer
from attoscope.trace.watch import watch

# What `diagnose` spends: so many documents, cut to so many tokens; of inputs that cannot be cut
# (images) and are longer than LONG two, longer than LONGER one, and none longer than LONGEST.
DOCUMENTS, TOKENS, LONG, LONGER, LONGEST = 4, 32, 64, 640, 1024
# Eigenvalues cost tokens cubed: of maps of more tokens they are those of so many tokens.
SAMPLED_TOKENS, SAMPLED_ABOVE, LARGEST = 256, MOST_TOKENS, 2048
# What it shows of them.
SHOWN = (
    "smoothing_margin", "smoothing_margin_without_gain", "map_largest", "map_smallest",
    "attention_second", "head_step", "attention_step", "rest_step",
)  # fmt: skip
# The leading eigenvector of a whole layer is found for so many documents: it takes longest.
DC_DOCUMENTS = 2
# Tokens times width up to which the leading eigenvector of a whole layer is found.
DC_SIZE = 40_000

_NULLS = (
    "random_margin", "random_largest", "random_smallest", "half", "random_asymmetry",
    "uniform_second", "uniform_smallest", "random_step",
)  # fmt: skip
HEAD_QUANTITIES = (*(spec.name for spec in HEADS), *_NULLS)
LAYER_QUANTITIES = ("attention_step", "rest_step", "random_attention_step")
DC_QUANTITIES = ("layer_dc_share", "one_over_tokens")


class Smoothing:
    """Gathers the numbers of every layer as it goes by.

    Args:
        maps: the value-output maps of the model.
        seed: of the bootstrap, and of the random maps that the stack is compared with.
        layers: (first, end) to read only some layers.
        dc_tokens: so many tokens of each of the first two documents for the leading eigenvector
            of a layer (the dear part); 0: none.
        carried: also carry the stream forward by attention alone.
        longest: attention maps of more tokens are left out: they take too much memory.
        sampled: (above, kept): of attention maps of more tokens than `above`, the eigenvalues are
            those of `kept` of them, the first and random others, rows divided by what is left.
    """

    def __init__(
        self,
        maps: Maps,
        *,
        seed: int = 0,
        layers: Span = None,
        dc_tokens: int = 0,
        carried: bool = False,
        longest: int = LARGEST,
        sampled: tuple[int, int] = (SAMPLED_ABOVE, SAMPLED_TOKENS),
    ) -> None:
        self.maps, self.layers, self.dc_tokens = maps, layers, dc_tokens
        self.most, self.sampled = longest, sampled
        self.heads = Tally(HEAD_QUANTITIES, seed=seed)
        self.steps = Tally(LAYER_QUANTITIES, seed=seed)
        self.shares = Tally(DC_QUANTITIES, seed=seed)
        self.carried = Carried(seed) if carried else None
        self.kinds: dict[tuple[str, int], Counter[str]] = {}
        self.flipped: dict[tuple[str, int], int] = {}
        self.reasons: dict[str, str] = {}
        self.used: dict[str, ValueMaps] = {}
        self.sinks: dict[str, float] = {}
        self.capped: set[str] = set()
        self.longest = 0
        self._spectra: dict[str, tuple[HeadMap, ...] | str] = {}

    def visit(self, layer: Layer, batch: Batch) -> None:
        """Take in one layer of one batch."""
        for call in layer.calls:
            if self.layers is None or self.layers[0] <= layer.index < self.layers[1]:
                self._site(layer, batch, call)

    def _site(self, layer: Layer, batch: Batch, call: AttentionCall) -> None:
        site, heads = str(call.site), call.shape[1]
        reason = self._unfit(layer, batch, call)
        if reason:
            self.reasons[site] = reason
            numbers = tuple(dict.fromkeys(batch.documents))
            nothing = np.full((len(numbers), len(HEAD_QUANTITIES), heads), math.nan)
            self.heads.add(site, numbers, nothing)
            if call.site.call == "self":
                self.steps.add(site, numbers, nothing[:, : len(LAYER_QUANTITIES), 0])
            return
        maps, spectra = self.maps.found[call.module], self._spectra[call.module]
        assert not isinstance(spectra, str)
        self.used[site] = maps
        if call.softcap is not None:
            self.capped.add(site)
        found: dict[int, tuple[Array, Array, Array]] = {}
        for document in documents_of(layer, batch, call, maps):
            self.longest = max(self.longest, len(document.x))
            self.sinks[site] = max(self.sinks.get(site, 0.0), document.sink)
            found[document.number] = self._document(site, document, maps, spectra)
            if self.carried is not None and call.site.call == "self":
                self.carried.take(layer, document, maps)
        broken = np.array([number not in found for number in batch.documents])
        for tally, which, cells in (
            (self.heads, 0, (len(HEAD_QUANTITIES), heads)),
            (self.steps, 1, (len(LAYER_QUANTITIES),)),
            (self.shares, 2, (len(DC_QUANTITIES),)),
        ):
            none = np.full(cells, math.nan)
            rows = [found[n][which] if n in found else none for n in batch.documents]
            marks = np.repeat(broken[:, None], heads, 1) if len(cells) > 1 else broken
            tally.add(site, batch.documents, np.stack(rows), broken=marks)

    def _unfit(self, layer: Layer, batch: Batch, call: AttentionCall) -> str:
        """Why a call has no spectra; empty where it has."""
        if call.site.call.startswith("cross") or call.shape[2] != call.shape[3]:
            return "cross attention: what is mixed is not the stream itself"
        if len(set(batch.documents)) < len(batch.documents):
            return "attention in windows: not one square map per document"
        if layer.stream_in is None or layer.stream_out is None or call.output is None:
            return "the residual stream is not seen here"
        if call.shape[2] > self.most:
            return f"{call.shape[2]} tokens: more than {self.most} take too much memory"
        if call.module not in self.maps.found:
            return self.maps.missing.get(call.module, "no value-output map was found")
        if call.module not in self._spectra:
            self._spectra[call.module] = _spectra(self.maps.found[call.module])
        found = self._spectra[call.module]
        return found if isinstance(found, str) else ""

    def _document(
        self, site: str, one: Document, maps: ValueMaps, spectra: tuple[HeadMap, ...]
    ) -> tuple[Array, Array, Array]:
        heads, layer = _steps(one, maps, spectra)
        dc = np.full(len(DC_QUANTITIES), math.nan)
        if len(one.x) >= 2:
            self._spectral(site, one, maps, spectra, heads)
            dc = self._shares(site, one, maps)
        return heads, layer, dc

    def _spectral(
        self, site: str, one: Document, maps: ValueMaps, spectra: tuple[HeadMap, ...],
        values: Array,
    ) -> None:  # fmt: skip
        """Fill in what the spectra say of each head, (quantity, head)."""
        scale = stream_scale(one, maps)
        residual = maps.joins != "replaces"
        uniform = uniform_spectrum(len(one.x), one.causal)
        maps_of_heads = self._tokens_for_spectra(one)
        for head, mine in enumerate(spectra):
            attention = attention_spectrum(maps_of_heads[head].numpy())
            ours, plain, random = mine.compare(attention, scale, residual)
            place = (site, head)
            self.kinds.setdefault(place, Counter())[ours.kind] += 1
            if plain is not None:
                turned = {ours.kind, plain.kind} == {"smooths", "sharpens"}
                self.flipped[place] = self.flipped.get(place, 0) + turned
            of, radius = mine.spectrum, mine.radius / scale
            values[: len(HEADS) - 1, head] = (
                ours.margin, math.nan if plain is None else plain.margin,
                of.largest / scale, of.smallest / scale, of.positive, of.asymmetry,
                attention.second, attention.smallest,
            )  # fmt: skip
            values[len(HEADS) : -1, head] = (
                random, radius, -radius, 0.5, random_asymmetry(one.x.shape[1]), *uniform,
            )  # fmt: skip

    def _tokens_for_spectra(self, one: Document) -> Tensor:
        """Attention among so many tokens as the eigenvalues may cost; causal maps whole."""
        above, kept = self.sampled
        tokens = len(one.x)
        if tokens <= above or kept >= tokens or one.causal:
            return one.attention
        self.reasons["attention maps"] = (
            f"of {tokens} tokens; eigenvalues are those of {kept} of them"
        )
        others = np.random.default_rng(one.number).choice(tokens - 1, kept - 1, replace=False)
        index = np.sort(np.append(others + 1, 0))
        part = one.attention[:, index][:, :, index]
        total = part.sum(-1, keepdim=True)
        # A row that looks at none of the kept tokens is taken to be even over them.
        return (part / total).where(total > 0, 1 / kept)

    def _shares(self, site: str, one: Document, maps: ValueMaps) -> Array:
        """The constant share of the layer's leading eigenvector, on the first tokens."""
        tokens, nothing = min(self.dc_tokens, len(one.x)), np.full(2, math.nan)
        if tokens < 2 or one.number >= DC_DOCUMENTS:
            return nothing
        if tokens * one.x.shape[1] > DC_SIZE:
            self.reasons.setdefault(
                f"{site} (leading eigenvector)",
                f"{tokens} tokens of {one.x.shape[1]} channels are too many",
            )
            return nothing
        attention = one.attention[:, :tokens, :tokens]
        attention = attention / attention.sum(-1, keepdim=True).clamp(min=1e-300)
        factors = maps.effective() / stream_scale(one, maps), maps.output
        try:
            share = operator_dc_share(
                attention.numpy(), (factors[0].numpy(), factors[1].numpy()),
                residual=maps.joins != "replaces",
            ).share  # fmt: skip
        except AttoscopeError as error:
            self.reasons.setdefault(f"{site} (leading eigenvector)", str(error))
            return nothing
        return np.array([share, 1 / tokens])

    def readings(self) -> tuple[Reading, ...]:
        """All readings, with the reasons for what is missing."""
        made = [
            *self._read(self.heads, HEADS, ("site", "head")),
            *self._read(self.steps, LAYERS, ("layer",)),
        ]
        if self.dc_tokens:
            made += self._read(self.shares, DC_SHARE, ("layer",))
        if self.carried is not None:
            made += self.carried.readings()
        return tuple(made)

    def _read(
        self, tally: Tally, specs: Sequence[Spec], dims: tuple[str, ...]
    ) -> list[Reading]:
        if not tally.places:
            return []
        reasons = [f"{place}: {why}" for place, why in self.reasons.items()]
        more = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" * (len(reasons) > 4))
        return [
            replace(one, reason="; ".join(filter(None, (more, one.reason))))
            for one in tally.readings(specs, dims)
        ]


def stream_scale(one: Document, maps: ValueMaps) -> float:
    """What the norm in front divides a token by, the median over the document; 1 without one.

    The median, because a massive first token must not speak for all.
    """
    scale = 1.0 if maps.norm is None else float(maps.norm.scale(one.x).median())
    return scale if scale > 0 else 1.0


def smoothing_readings(
    subject: Subject,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    layers: Span = None,
    documents: int = DOCUMENTS,
    tokens: int = TOKENS,
) -> tuple[Reading, ...]:
    """The cheap part of the prediction (`SHOWN`): spectra, margins, and what layers did.

    Reads the first `documents` of the batches, cut to `tokens` tokens each; images are read whole,
    of large ones two (eigenvalues of attention
    on `TOKENS` tokens). Readings over (site, head) and (layer,), with intervals over documents
    and nulls. Gives none where the model does not let itself be read this way.
    """
    try:
        whole = max(stack.length for stack in subject.layout(batches[0]).stacks)
        uncut = batches[0].valid is None and whole > LONG
        if uncut:
            documents = min(documents, 2 if whole <= LONGER else 1)
        parts = cut_all(subject, batches, documents, tokens)
        maps = value_maps(subject, parts[0])
        seen = Smoothing(
            maps, seed=seed, layers=layers, longest=LONGEST, sampled=(LONG, TOKENS)
        )
        for part in parts:
            watch(subject, part, seen.visit)
    except AttoscopeError:
        return ()
    return tuple(reading for reading in seen.readings() if reading.name in SHOWN)


def cut_all(
    subject: Subject, batches: Sequence[Batch], documents: int, tokens: int
) -> list[Batch]:
    """The first documents of several batches, cut; one document at least."""
    parts: list[Batch] = []
    for batch in batches:
        left = max(1, documents) - sum(map(len, parts))
        if left > 0 and isinstance(batch.inputs, Tensor):
            floats = batch.inputs.dim() == 3
            axis = subject.batch_axis(batch.inputs) if floats else 0
            parts.append(take(batch, list(range(min(left, len(batch)))), axis))
        elif left > 0:
            parts.append(cut(batch, left, tokens))
    return parts


def _spectra(maps: ValueMaps) -> tuple[HeadMap, ...] | str:
    try:
        return tuple(head_maps(maps))
    except AttoscopeError as error:
        return str(error)


def _steps(one: Document, maps: ValueMaps, spectra: tuple[HeadMap, ...]) -> tuple[Array, Array]:
    """Steps of every head (the other quantities NaN), and of attention and the rest.

    The null replaces each map by a random one of the same norm: its update then has the mean
    squared norm `energy * ||J A Y||^2` in the mean of the tokens and `energy * ||(I - J) A Y||^2`
    in what differs, with Y the stream as the norm in front makes it.
    """
    x, content = one.x, one.content
    values = np.full((len(HEAD_QUANTITIES), len(spectra)), math.nan)
    layer = np.full(len(LAYER_QUANTITIES), math.nan)
    if int(content.sum()) < 2:
        return values, layer
    start = float(log_ratio(x, content))
    residual = maps.joins != "replaces"
    seen = x if maps.norm is None else maps.norm.direction(x)
    high, low = (float(part) * residual for part in high_and_low(x, content))
    total_high, total_low = high, low
    for head, mine in enumerate(spectra):
        written = one.written[:, head]
        after = x + written if residual else written
        mixed_high, mixed_low = high_and_low(one.attention[head] @ seen, content)
        more_high, more_low = float(mixed_high) * mine.energy, float(mixed_low) * mine.energy
        total_high, total_low = total_high + more_high, total_low + more_low
        values[HEAD_QUANTITIES.index("head_step"), head] = (
            float(log_ratio(after, content)) - start
        )
        values[-1, head] = _half_log(high + more_high, low + more_low) - start
    end = float(log_ratio(one.out, content))
    if maps.joins != "changed":
        update = one.written.sum(1)
        if maps.bias is not None:
            update = update + maps.bias.double().cpu()
        middle = float(log_ratio(x + update if residual else update, content))
        layer[:] = middle - start, end - middle, _half_log(total_high, total_low) - start
    return values, np.where(np.isfinite(layer), layer, math.nan)


def _half_log(high: float, low: float) -> float:
    return 0.5 * math.log(high / low) if high > 0 and low > 0 else math.nan
