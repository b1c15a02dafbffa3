"""The mean over the keys that a query may see: J of the smoothing literature, masks respected.

Which argument of an attention module is its mask, and of what sort, is found on a run with padding
and compared there with what the kernel itself allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.trace import AttentionCall
from attoscope.trace.rows import allowed_rows
from attoscope.trace.types import FORBIDDEN


@dataclass(frozen=True, slots=True)
class MaskArgument:
    """An argument of an attention module that is a mask.

    `by_query` says that its last axes are (query, key), else they are (batch, key). Numbers are
    added to the scores; a boolean allows, or forbids where `forbids`.
    """

    name: str
    position: int | None
    by_query: bool
    forbids: bool

    def among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument's value in a call, or None."""
        if self.name in kwargs:
            return kwargs[self.name]
        given = self.position is not None and self.position < len(args)
        return args[self.position] if given and self.position is not None else None

    def allowed(self, mask: Tensor) -> Bool[Tensor, "batch query key"]:
        """(batch|1, query|1, key): True where a key may be seen."""
        if mask.dtype == torch.bool:
            mask = ~mask if self.forbids else mask
        else:
            mask = mask > FORBIDDEN if mask.is_floating_point() else mask != 0
        if mask.dim() == 4:
            return mask[:, 0]  # heads forbid alike, which was seen when the mask was found
        if mask.dim() == 3:
            return mask[:1]  # heads folded into the batch, as nn.MultiheadAttention has it
        return mask[None] if self.by_query else mask[:, None]


@dataclass(frozen=True, slots=True)
class Sees:
    """Which keys a query may see: `masks` together, and not later keys where `causal`.

    A mask by query holds the causal triangle itself, unless `always`.
    """

    masks: tuple[MaskArgument, ...]
    causal: bool
    always: bool

    @staticmethod
    def of(record: dict[str, Any]) -> Sees:
        """From plain data."""
        masks = tuple(MaskArgument(**mask) for mask in record["masks"])
        return Sees(masks, record["causal"], record["always"])

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
        """What one call of the attention module lets its queries see."""
        allowed: Tensor | None = None
        for argument in self.masks:
            mask = argument.among(args, kwargs)
            if mask is None:
                continue
            if not isinstance(mask, Tensor):
                raise AttoscopeError(
                    f"{argument.name}: got {type(mask).__name__}; expected a tensor; load the "
                    "model with attn_implementation='sdpa' or 'eager'"
                )
            found = argument.allowed(mask)
            allowed = found if allowed is None else allowed & found
        by_query = allowed is not None and allowed.shape[1] > 1
        return Seen(allowed, self.causal and (self.always or not by_query))


@dataclass(frozen=True, slots=True)
class Seen:
    """Allowed keys of one forward pass (None: all), and whether later ones are forbidden too."""

    allowed: Bool[Tensor, "batch query key"] | None
    causal: bool

    def mean(
        self, rows: Float[Tensor, "batch token width"]
    ) -> Float[Tensor, "batch out width"]:
        """For each query the mean of `rows` over the keys it may see; one row where all agree."""
        tokens = rows.shape[1]
        if self.allowed is None:
            if not self.causal:
                return rows.mean(1, keepdim=True)
            count = torch.arange(1, tokens + 1, device=rows.device, dtype=torch.float32)
            return (rows.float().cumsum(1) / count[:, None]).to(rows.dtype)
        if self.allowed.shape[2] != tokens:
            raise AttoscopeError(
                f"mask: got {self.allowed.shape[2]} keys for {tokens} tokens (a cache); expected "
                "whole sequences, as the mean is over all that a query may see; set use_cache=False"
            )
        if self.allowed.shape[1] == 1:
            keys = self.allowed[:, 0, :, None].float()
            if self.causal:
                total, count = (rows.float() * keys).cumsum(1), keys.cumsum(1)
            else:
                total, count = (rows.float() * keys).sum(1, True), keys.sum(1, True)
            return (total / count.clamp(min=1)).to(rows.dtype)
        weights = self.rows(tokens).to(rows.dtype)
        return (weights @ rows) / weights.sum(-1, keepdim=True).clamp(min=1)

    def rows(self, tokens: int) -> Bool[Tensor, "batch token key"]:
        """Allowed keys of every query."""
        device = None if self.allowed is None else self.allowed.device
        allowed = torch.ones(1, tokens, tokens, dtype=torch.bool, device=device)
        allowed = allowed.tril() if self.causal else allowed
        return allowed if self.allowed is None else allowed & self.allowed


def past_tokens(args: tuple[Any, ...], kwargs: dict[str, Any], layer: int) -> int:
    """How many tokens a cache among the arguments holds for this layer already."""
    for value in (*args, *kwargs.values()):
        if hasattr(value, "get_seq_length"):
            return int(value.get_seq_length(layer))
        pair = isinstance(value, tuple) and len(value) >= 2
        if pair and all(isinstance(x, Tensor) and x.dim() == 4 for x in value[:2]):
            return int(value[0].shape[2])
    return 0


def find_sees(
    call: AttentionCall,
    valid: Bool[Tensor, "batch token"],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    causal: bool,
) -> Sees:
    """The masks of an attention module, from one call of it and what its kernel allowed.

    Raises `AttoscopeError` where no reading of its arguments gives the keys that were allowed.
    """
    batch, _, tokens, _ = call.shape
    positions = torch.arange(tokens, device=valid.device).expand(batch, -1)
    allowed = allowed_rows(call, positions)
    alike = bool((allowed == allowed[:, :1]).all())
    candidates = list(_candidates(module, args, kwargs, batch, tokens))
    for masks, always in product(_subsets(candidates), (False, True)):
        sees = Sees(masks, causal, always)
        rows = sees.given(args, kwargs).rows(tokens)
        if alike and torch.equal(rows.expand_as(allowed[:, 0])[valid], allowed[:, 0][valid]):
            return sees
    raise AttoscopeError(
        f"{call.site} ({call.module}): the keys that its kernel allows are not those that its mask "
        "arguments and causality give (a window, a mask made inside, or one by head); expected a "
        "mask that the attention module receives"
    )


def _subsets(candidates: list[MaskArgument]) -> Iterator[tuple[MaskArgument, ...]]:
    """None, all of one reading each, then each alone."""
    if not candidates:
        yield ()
        return
    names = list(dict.fromkeys(c.name for c in candidates))
    readings = [[c for c in candidates if c.name == name] for name in names]
    yield from product(*readings)
    yield from ((candidate,) for candidate in candidates)
    yield ()


def _candidates(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, tokens: int
) -> Iterator[MaskArgument]:
    """Arguments that could be a mask, in each way they could be meant."""
    names = list(inspect.signature(module.forward).parameters)
    # Torch's own: which of the two is given depends on the call.
    if isinstance(module, nn.MultiheadAttention):
        yield from _torch_masks(names)
        return
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, value in given.items():
        if not isinstance(value, Tensor) or value.dim() not in (2, 4):
            continue
        position = names.index(name) if name in names else None
        if value.dim() == 4 and value.shape[-2:] in ((tokens, tokens), (1, tokens)):
            shapes = [True]
        elif value.dim() == 2:
            shapes = [value.shape == (tokens, tokens)] if batch != tokens else [True, False]
            shapes = shapes if value.shape in ((tokens, tokens), (batch, tokens)) else []
        else:
            shapes = []
        flips = (False, True) if value.dtype == torch.bool else (False,)
        for by_query, forbids in product(shapes, flips):
            yield MaskArgument(name, position, by_query, forbids)


def _torch_masks(names: list[str]) -> Iterator[MaskArgument]:
    for name, by_query in (("key_padding_mask", False), ("attn_mask", True)):
        yield MaskArgument(name, names.index(name), by_query, True)
