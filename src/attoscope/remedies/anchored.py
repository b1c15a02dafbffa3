"""Remedies that bring the first layer's values back: NeuTRENO and value residuals."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.kinds import (
    Built,
    Kind,
    check_choice,
    check_number,
    installed,
    openers,
    unique,
    weight_of,
)
from attoscope.remedies.places import Heads, Place, module_at
from attoscope.remedies.scaled import look, mean_of
from attoscope.remedies.stability import above, limits
from attoscope.remedies.taps import Anchor, Remedy, Sample, output_of, running_again, value_of
from attoscope.remedies.visible import Seen
from attoscope.trace import Batch, Subject

AnchorKind = Literal["first", "zero", "mean"]


class Anchored(Remedy):
    """A remedy that knows the first layer's values. `opens` says that this is that layer."""

    transient: ClassVar[tuple[str, ...]] = ("sample", "term")

    def __init__(self, place: Place, anchor: Anchor, opens: bool, shared: bool) -> None:
        super().__init__(place)
        self.anchor, self.opens, self.shared = anchor, opens, shared
        self.sample: Sample | None
        self.term: Tensor | None

    def attach(self, model: nn.Module) -> list[Any]:
        handles = []
        if self.opens:
            owner = module_at(model, self.place.owner)
            handles.append(owner.register_forward_pre_hook(self.anchor.begin))
            handles.append(owner.register_forward_hook(self.anchor.end))
        handles.append(value_of(model, self.place).register_forward_hook(self.on_values))
        return handles

    def on_values(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Hook of the value projection."""
        raise NotImplementedError

    def first(self, values: Tensor) -> Tensor | None:
        """The first layer's values; None in that layer itself, which sets them."""
        again = running_again() and self.anchor.kept
        if again and self.shared:
            raise AttoscopeError(
                "gradient checkpointing: got layers that share their weights, whose runs cannot be "
                "told apart; switch checkpointing off"
            )
        if self.opens and (again or self.anchor.values is None):
            if not again:
                self.anchor.set(values)
            return None
        first = self.anchor.get()
        if self.anchor.kept:
            if again and self.sample is not None:
                self.sample.check(values)
            elif not again:
                self.sample = Sample(values)
        return first


class Neutreno(Anchored):
    """`U = A V + strength (V^0 - V)` per head, before the output projection.

    `anchor` "first" takes V^0 from the first layer of the stack, which is itself left as it is;
    "zero" puts 0 in its place, "mean" its mean over the keys that a token may see. The buffer
    `strength` may be set between steps. Costs two additions of the values' size per layer, and
    keeps the first layer's values until the last layer has run.
    """

    kind = "neutreno"
    transient: ClassVar[tuple[str, ...]] = ("sample", "term", "seen")
    fixed: ClassVar[tuple[str, ...]] = ("strength",)

    def __init__(
        self,
        place: Place,
        anchor: Anchor,
        like: Tensor,
        *,
        opens: bool,
        shared: bool,
        strength: float,
        towards: AnchorKind,
    ) -> None:
        super().__init__(place, anchor, opens, shared)
        self.towards = towards
        self.seen: Seen | None
        self.strength: Tensor
        self.setting("strength", strength, like)

    def attach(self, model: nn.Module) -> list[Any]:
        handles = super().attach(model)
        if self.opens and self.towards == "mean":
            attention = module_at(model, self.place.attention)
            hook = attention.register_forward_pre_hook(self.on_enter, with_kwargs=True)
            handles.append(hook)
        output = output_of(model, self.place)
        return [*handles, output.register_forward_pre_hook(self.on_heads)]

    def on_enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Hook of the first attention module, where the anchor is a mean."""
        self.seen = look(self, module, args, kwargs)

    def on_values(self, module: nn.Module, args: Any, output: Tensor) -> None:
        values = self.place.heads.own(output)
        if self.opens and self.towards == "mean":
            seen, self.seen = self.seen, None
            first = self.first(mean_of(self.place, seen, values))
        else:
            first = self.first(values)
        if first is None:
            self.term = None
        else:
            target = -values if self.towards == "zero" else first - values
            self.term = self.place.heads.spread(target)

    def on_heads(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hook of the output projection: adds the term to what the heads gave."""
        term, self.term = self.term, None
        if term is None:
            return None
        return (torch.add(args[0], self.strength * term), *args[1:])


def anchored_places(places: list[Place], kind: str) -> list[tuple[Place, Anchor, bool, bool]]:
    """Each place with its stack's anchor, whether it opens the stack, and whether it is shared.

    Raises `AttoscopeError` where the layers of a stack have values of different widths.
    """
    first = openers(places)
    if len(places) == len(first):
        raise AttoscopeError(
            f"{kind}: got stacks of one attention layer each; expected two layers or more, as "
            "later ones are tied to the values of the first"
        )
    anchors = {stack: Anchor() for stack in first}
    for place in places:
        mine, wanted = place.heads.width, first[place.stack].heads.width
        if mine != wanted:
            raise AttoscopeError(
                f"{kind}: got values of width {mine} in {place.stack}.{place.layer} and {wanted} "
                "in its first layer; expected one width, as the values are subtracted"
            )
    return [
        (place, anchors[place.stack], place == first[place.stack], shared)
        for place, shared in unique(places)
    ]


def said(opens: bool, shared: bool, what: str) -> str:
    """What a remedy does in its place, in words."""
    if shared:
        return f"gives its values as V^0 when it first runs, {what} later"
    return "gives its values as V^0" if opens else what


class NeutrenoKind(Kind):
    name = "neutreno"
    anchored = True
    defaults: ClassVar[dict[str, Any]] = {"strength": 0.6, "anchor": "first"}

    def check(self, options: dict[str, Any]) -> None:
        check_number("strength", options["strength"])
        check_choice("anchor", options["anchor"], ("first", "zero", "mean"))

    def masked(self, options: dict[str, Any]) -> bool:
        return bool(options["anchor"] == "mean")

    def warnings(
        self, subject: Subject, batch: Batch, options: dict[str, Any], inputs: str
    ) -> list[str]:
        if not options["strength"]:
            return []
        sentence = above(limits(subject, batch), options["strength"], inputs)
        return [] if sentence is None else [sentence]

    def build(self, model: nn.Module, places: list[Place], options: dict[str, Any]) -> Built:
        pairs: list[tuple[Place, Remedy, str]] = []
        for place, anchor, opens, shared in anchored_places(places, self.name):
            remedy = Neutreno(
                place, anchor, weight_of(model, place), opens=opens, shared=shared,
                strength=options["strength"], towards=options["anchor"],
            )  # fmt: skip
            pairs.append((place, remedy, said(opens, shared, "adds strength (V^0 - V)")))
        return installed(model, pairs)


class ValueResidual(Anchored):
    """`A (shares[0] V^0 + shares[1] V)`: the first layer's values mixed in before attention.

    `shares` (2) is the pair, a buffer or, where learned, a parameter per layer. Costs two additions
    per layer, and a copy of a fused projection's output. A cache holds the mixed values.
    """

    kind = "value_residual"
    fixed: ClassVar[tuple[str, ...]] = ("shares",)

    def __init__(
        self,
        place: Place,
        anchor: Anchor,
        like: Tensor,
        *,
        opens: bool,
        shared: bool,
        shares: tuple[float, float],
        learnable: bool,
    ) -> None:
        super().__init__(place, anchor, opens, shared)
        numbers = torch.tensor(shares, dtype=torch.float32, device=like.device)
        self.shares: Tensor
        # The layer that opens the stack mixes nothing: it has nothing to learn.
        if learnable and (shared or not opens):
            self.shares = nn.Parameter(numbers.to(like.dtype))
        else:
            self.register_buffer("shares", numbers)

    def on_values(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        heads: Heads = self.place.heads
        values = heads.own(output)
        first = self.first(values)
        if first is None:
            return None
        mixed = self.shares[0] * first + self.shares[1] * values
        return heads.put(output, mixed.to(output.dtype))


class ValueResidualKind(Kind):
    name = "value_residual"
    anchored = True
    defaults: ClassVar[dict[str, Any]] = {"shares": (0.5, 0.5), "learnable": False}

    def check(self, options: dict[str, Any]) -> None:
        shares = options["shares"]
        if not isinstance(shares, tuple | list) or len(shares) != 2:
            raise AttoscopeError(f"shares: got {shares!r}; expected two numbers, as (0.5, 0.5)")
        options["shares"] = tuple(shares)
        for share in shares:
            check_number("shares", share)
        check_choice("learnable", options["learnable"], (True, False))

    def build(self, model: nn.Module, places: list[Place], options: dict[str, Any]) -> Built:
        pairs: list[tuple[Place, Remedy, str]] = []
        for place, anchor, opens, shared in anchored_places(places, self.name):
            remedy = ValueResidual(
                place, anchor, weight_of(model, place), opens=opens, shared=shared, **options
            )
            pairs.append((place, remedy, said(opens, shared, "mixes V^0 into its values")))
        return installed(model, pairs)
