"""Selection problems from the heads of a live model: what each query chose, and among what.

In *head space* keys and queries are as the kernel sees them (after rotary embedding, key heads
shared as in the model), and the head's own weight is `scale` times the identity. In the *stream*
they are what the projections read, and the weight is `scale * W_K^T [W_Q, b_Q]`, with a 1 added
to every query; the key's bias shifts all scores of a query alike and drops out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.svm.selection import Selection
from attoscope.trace.rows import attention_rows
from attoscope.trace.subject import Subject
from attoscope.trace.types import AttentionCall, Batch, Layer
from attoscope.trace.watch import watch

Space = Literal["head", "stream"]
# Scores remade from a projection's weights may differ from the model's by this, relatively.
MATCH = 1e-3


@dataclass(frozen=True, eq=False)
class HeadSelection:
    """What one head chose, as a problem that `AttentionSVM` solves, and the head's own weight.

    `documents` and `positions` say which token each query is; `ties` counts keys left out because
    they equal a chosen one, `undecided` queries left out because nothing competes.
    """

    selection: Selection
    weight: Float[np.ndarray, "key_width width"]
    site: str
    head: int
    space: Space
    documents: Int[np.ndarray, " query"]
    positions: Int[np.ndarray, " query"]
    ties: int
    undecided: int


def head_selections(
    subject: Subject,
    batch: Batch,
    *,
    sites: tuple[str, ...] | None = None,
    heads: tuple[int, ...] | None = None,
    space: Space = "head",
    keep: float = 1.0,
    queries: int | None = None,
    seed: int = 0,
) -> list[HeadSelection]:
    """The selection problem of every head asked for, from one run of the model on `batch`.

    A query chooses the keys whose weight is at least `keep` times its largest (1: only the
    largest). Padding is neither query nor key. Additive biases of the scores go into
    `Selection.bias`.

    Args:
        subject: the model.
        batch: what it reads; each sequence of the batch is a sequence of keys.
        sites: as "encoder.3" or "decoder.0.cross"; all when left out.
        heads: query heads; all when left out.
        space: "head", or "stream" where the projections can be found.
        keep: 0 to 1.
        queries: at most so many queries per head, drawn evenly at random from all.
        seed: for that draw.

    Raises `AttoscopeError` where a site does not exist, and in the stream for rotary embeddings
    or normalised queries, which have no single weight. Source: arXiv 2308.16898.
    """
    if not 0.0 < keep <= 1.0:
        raise AttoscopeError(f"keep: got {keep}; expected a number above 0 and at most 1")
    found: list[HeadSelection] = []
    seen: list[str] = []
    reads: dict[str, list[_Read]] = {}

    def visit(layer: Layer, batch: Batch) -> None:
        for call in layer.calls:
            seen.append(str(call.site))
            if sites is None or str(call.site) in sites:
                rows = _Rows(layer, call, keep, queries, seed)
                maps = _Head(call) if space == "head" else _Stream(call, reads)
                wanted = range(call.shape[1]) if heads is None else heads
                found.extend(rows.selection(maps, head) for head in wanted)
        reads.clear()

    with _projections(subject.model, reads) if space == "stream" else _nothing():
        watch(subject, batch, visit)
    missing = [site for site in sites or () if site not in seen]
    if missing:
        raise AttoscopeError(
            f"sites: got {', '.join(missing)}; expected some of {', '.join(sorted(set(seen)))}"
        )
    return found


class _Rows:
    """The queries of one call that are asked: which, what they may see, what they chose."""

    def __init__(
        self, layer: Layer, call: AttentionCall, keep: float, queries: int | None, seed: int
    ) -> None:
        if call.query is None or call.key is None:
            raise AttoscopeError(
                f"{call.site}: this model gives its attention weights only; expected queries and "
                "keys, which its kernel does not show"
            )
        self.call, self.keep = call, keep
        crossing = layer.key_valid is not None and call.site.call.startswith("cross")
        self.key_valid = layer.key_valid if crossing else layer.valid
        asked = torch.nonzero(layer.valid.cpu())
        if queries is not None and len(asked) > queries:
            generator = np.random.default_rng(seed)
            pick = np.sort(generator.choice(len(asked), queries, replace=False))
            asked = asked[torch.from_numpy(pick)]
        self.documents, self.positions = asked[:, 0].numpy(), asked[:, 1].numpy()

    def selection(self, maps: _Head | _Stream, head: int) -> HeadSelection:
        call = self.call
        if not 0 <= head < call.shape[1]:
            raise AttoscopeError(
                f"heads: got {head}; expected 0 to {call.shape[1] - 1}, as {call.site} has "
                f"{call.shape[1]} heads"
            )
        weights, allowed, bias = self._read(head)
        chosen = (
            allowed & (weights > 0) & (weights >= self.keep * weights.max(1, keepdims=True))
        )
        if self.keep == 1.0:
            # Equal weights may be a tie of rounding: the first one is the choice.
            chosen &= np.cumsum(chosen, 1) == 1
        asks = chosen.any(1) & (allowed & ~chosen).any(1)
        if not asks.any():
            raise AttoscopeError(
                f"{call.site}, head {head}: got no query with keys to choose between; expected "
                "texts of two tokens or more"
            )
        keys, queries = maps.sides(head, self.documents[asks], self.positions[asks])
        selection = Selection(
            keys, queries, chosen[asks], self.documents[asks], allowed=allowed[asks],
            bias=None if bias is None else bias[asks],
        )  # fmt: skip
        pairs = selection.duplicates()
        if len(pairs):
            selection = selection.without(pairs)
        return HeadSelection(
            selection, maps.weight(head), str(call.site), head, maps.space,
            self.documents[asks], self.positions[asks], len(pairs), int((~asks).sum()),
        )  # fmt: skip

    def _read(self, head: int) -> tuple[Any, Any, Any]:
        """Weights, allowed keys and additive bias of the asked queries, (query, key)."""
        call = self.call
        documents = torch.from_numpy(self.documents)
        weights = np.empty((len(documents), call.shape[3]), np.float64)
        allowed = np.empty(weights.shape, bool)
        bias = np.zeros(weights.shape) if _biased(call) else None
        assert self.key_valid is not None
        for d in np.unique(self.documents):
            mine = np.flatnonzero(self.documents == d)
            part = _one(call, int(d))
            rows = attention_rows(part, torch.from_numpy(self.positions[mine])[None])
            weights[mine] = rows.weights[0, head].double().cpu().numpy()
            open_ = rows.allowed[0, head if rows.allowed.shape[1] > 1 else 0]
            allowed[mine] = (open_ & self.key_valid[d].to(open_.device)).cpu().numpy()
            if bias is not None:
                bias[mine] = self._bias(part, head, mine) * allowed[mine]
        return np.where(allowed, weights, 0.0), allowed, bias

    def _bias(self, part: AttentionCall, head: int, mine: Any) -> Any:
        """What is added to this head's scores: its mask, where it is a number."""
        assert part.mask is not None
        mask = part.mask.expand(1, part.shape[1], part.shape[2], part.shape[3])
        return mask[0, head].double().cpu().numpy()[self.positions[mine]].clip(-1e4)


def _biased(call: AttentionCall) -> bool:
    """Whether a mask of numbers adds something besides forbidding."""
    if call.mask is None or call.mask.dtype == torch.bool:
        return False
    adds = bool(((call.mask > -1e4) & (call.mask != 0)).any())
    if adds and call.softcap is not None:
        raise AttoscopeError(
            f"{call.site}: got soft-capped scores with an additive bias; expected one of them, as "
            "both together are no linear constraint on a weight"
        )
    return adds


def _one(call: AttentionCall, document: int) -> AttentionCall:
    """The call of one sequence of the batch."""

    def part(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.shape[0] == 1:
            return tensor
        return tensor[document : document + 1]

    return replace(
        call, query=part(call.query), key=part(call.key), value=None, mask=part(call.mask),
        probabilities=part(call.probabilities), raw_scores=part(call.raw_scores), output=None,
    )  # fmt: skip


class _Head:
    """Keys and queries as the kernel sees them."""

    space: Space = "head"

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.group = call.key_head()

    def sides(self, head: int, documents: Any, positions: Any) -> tuple[Any, Any]:
        assert self.call.query is not None and self.call.key is not None
        keys = self.call.key[:, self.group[head]].double().cpu().numpy()
        queries = self.call.query[:, head].double().cpu().numpy()
        return keys, queries[documents, positions]

    def weight(self, head: int) -> Any:
        assert self.call.query is not None
        return self.call.scale * np.eye(self.call.query.shape[-1])


@dataclass(frozen=True, slots=True)
class _Read:
    """One linear map inside an attention module: what it read, wrote, and with which weights."""

    module: nn.Module
    read: Tensor
    wrote: Tensor

    def rows(self) -> tuple[Tensor, Tensor]:
        """(output, input) weight and (output,) bias, whichever way the module stores them."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        if weight.shape[0] != self.wrote.shape[-1] or isinstance(
            getattr(self.module, "nf", None), int
        ):
            weight = weight.T
        bias = getattr(self.module, "bias", None)
        zero = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
        return weight.detach(), zero if bias is None else bias.detach()


class _Stream:
    """Keys and queries as the projections read them, found by what they wrote."""

    space: Space = "stream"

    def __init__(self, call: AttentionCall, reads: dict[str, list[_Read]]) -> None:
        self.call = call
        self.group = call.key_head()
        near = reads.get(call.module, [])
        assert call.query is not None and call.key is not None
        self.of_query = self._find(near, call.query, "queries")
        self.of_key = self._find(near, call.key, "keys")

    def _find(self, near: list[_Read], heads: Tensor, what: str) -> tuple[_Read, int]:
        """The map, and the row of its output, at which these heads' numbers begin."""
        batch, count, tokens, size = heads.shape
        flat = heads.transpose(1, 2).reshape(batch, tokens, count * size).float()
        bound = MATCH * float(flat.abs().max())
        for read in near:
            wrote = read.wrote.float()
            if wrote.dim() == 2 and wrote.shape[0] == batch * tokens:
                wrote = wrote.reshape(batch, tokens, -1)
            if wrote.shape[:2] != flat.shape[:2]:
                continue
            for start in range(0, wrote.shape[-1] - count * size + 1, count * size):
                part = wrote[..., start : start + count * size]
                if float((part - flat).abs().max()) <= bound:
                    return read, start
        raise AttoscopeError(
            f"{self.call.site}: no linear map gives this head's {what} as they enter the scores "
            "(rotary embedding, normalised queries, or another layout); expected plain "
            'projections, so use space="head"'
        )

    def _part(self, found: tuple[_Read, int], head: int) -> tuple[Any, Any]:
        assert self.call.query is not None
        size = self.call.query.shape[-1]
        weight, bias = found[0].rows()
        rows = slice(found[1] + head * size, found[1] + (head + 1) * size)
        return weight[rows].double().cpu().numpy(), bias[rows].double().cpu().numpy()

    def sides(self, head: int, documents: Any, positions: Any) -> tuple[Any, Any]:
        batch, _, tokens, key_tokens = self.call.shape
        keys = self.of_key[0].read.reshape(batch, key_tokens, -1).double().cpu().numpy()
        queries = self.of_query[0].read.reshape(batch, tokens, -1).double().cpu().numpy()
        queries = queries[documents, positions]
        return keys, np.hstack([queries, np.ones((len(queries), 1))])

    def weight(self, head: int) -> Any:
        wk, _ = self._part(self.of_key, int(self.group[head]))
        wq, bq = self._part(self.of_query, head)
        return self.call.scale * wk.T @ np.hstack([wq, bq[:, None]])


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _projections(model: nn.Module, reads: dict[str, list[_Read]]) -> Iterator[None]:
    """Notes what every map with a weight matrix read and wrote, under its parent modules."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
                parts = name.split(".")
                for depth in range(len(parts)):
                    above = ".".join(parts[:depth])
                    reads.setdefault(above, []).append(_Read(module, inputs[0], output))

        return note

    handles = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if (
            isinstance(weight, Tensor)
            and weight.dim() == 2
            and not isinstance(module, nn.Embedding)
        ):
            handles.append(module.register_forward_hook(hook(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
