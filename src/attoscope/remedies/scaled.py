"""Remedies that scale what differs from the mean: AttnScale, centred attention and FeatScale."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.kinds import Built, Kind, check_number, installed, unique, weight_of
from attoscope.remedies.places import Place, module_at
from attoscope.remedies.spectral import row_map
from attoscope.remedies.taps import Remedy, output_of, value_of
from attoscope.remedies.visible import Seen, past_tokens


class Averaging(Remedy):
    """A remedy that needs J, the mean over the keys that a query may see.

    A hook on the attention module notes its masks before it runs.
    """

    transient: ClassVar[tuple[str, ...]] = ("seen", "values")

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.seen: Seen | None
        self.values: Tensor | None

    def attach(self, model: nn.Module) -> list[Any]:
        attention = module_at(model, self.place.attention)
        return [attention.register_forward_pre_hook(self.on_enter, with_kwargs=True)]

    def on_enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Hook of the attention module."""
        self.seen = look(self, module, args, kwargs)

    def mean(self, rows: Tensor) -> Tensor:
        """J applied to what a projection read or wrote."""
        seen, self.seen = self.seen, None
        return mean_of(self.place, seen, rows)


def look(
    remedy: Remedy, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Seen:
    """What this call of an attention module may see; a sentence where a cache holds part of it."""
    place: Place = remedy.place
    past = past_tokens(args, kwargs, int(getattr(module, "layer_idx", None) or place.layer))
    if past:
        raise AttoscopeError(
            f"{remedy.kind}: got {past} tokens in a cache; expected whole sequences, as the mean "
            "over the keys needs all their values; run with use_cache=False"
        )
    assert place.sees is not None
    return place.sees.given(args, kwargs)


def mean_of(place: Place, seen: Seen | None, rows: Tensor) -> Tensor:
    """J of rows that are (batch, token, width), or (token, batch, width) where time is first."""
    if seen is None:
        raise AttoscopeError(
            f"{place.attention}: its projection ran without the attention module around it; "
            "expected calls of the module itself"
        )
    if rows.dim() == 2:
        return seen.mean(rows[None])[0]
    if place.time_first:
        return seen.mean(rows.transpose(0, 1)).transpose(0, 1)
    return seen.mean(rows)


class AttnScale(Averaging):
    """`J V + (1 + w_h)(A V - J V)`: what differs from the mean is scaled, head by head.

    `weight` (head) is learned and starts at 0, where the model is as it was. Costs one mean over
    tokens per layer; under a mask by query a product of (token, token) with the values.
    """

    kind = "attnscale"

    def __init__(self, place: Place, like: Tensor) -> None:
        super().__init__(place)
        heads = place.heads.count * place.heads.repeat
        self.weight = nn.Parameter(torch.zeros(heads, device=like.device, dtype=like.dtype))

    def attach(self, model: nn.Module) -> list[Any]:
        return [
            *super().attach(model),
            value_of(model, self.place).register_forward_hook(self.on_values),
            output_of(model, self.place).register_forward_pre_hook(self.on_heads),
        ]

    def on_values(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Hook of the value projection."""
        self.values = self.place.heads.own(output)

    def factor(self) -> Float[Tensor, " width"]:
        """w of every column that the output projection reads."""
        return self.weight.repeat_interleave(self.place.heads.size)

    def on_heads(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hook of the output projection."""
        values, self.values = self.values, None
        if values is None:
            return None
        mean = self.place.heads.spread(self.mean(values))
        return (self.changed(args[0], mean), *args[1:])

    def changed(self, heads: Tensor, mean: Tensor) -> Tensor:
        """What the output projection reads instead of `heads`."""
        return heads + self.factor() * (heads - mean)


class Centred(AttnScale):
    """`A V - strength J V`: the mean is taken out, nothing is learned. Costs as `AttnScale`."""

    kind = "centred"
    fixed: ClassVar[tuple[str, ...]] = ("strength",)

    def __init__(self, place: Place, like: Tensor, strength: float) -> None:
        Averaging.__init__(self, place)
        self.strength: Tensor
        self.setting("strength", strength, like)

    def changed(self, heads: Tensor, mean: Tensor) -> Tensor:
        return heads - self.strength * mean


class FeatScale(Averaging):
    """`(1 + s) J Z + (1 + t)(Z - J Z)` of the output projection's Z, before the residual sum.

    `low` is s and `high` is t, (width) each, learned and 0 at the start, where the model is as it
    was. This is the published form; the released code adds both parts to Z once more, which makes
    the factors 1 + 2s and 1 + 2t. Costs one mean over tokens per layer.
    """

    kind = "featscale"

    def __init__(self, place: Place, like: Tensor, width: int) -> None:
        super().__init__(place)
        options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.low = nn.Parameter(torch.zeros(width, **options))
        self.high = nn.Parameter(torch.zeros(width, **options))

    def attach(self, model: nn.Module) -> list[Any]:
        output = output_of(model, self.place)
        return [*super().attach(model), output.register_forward_hook(self.on_output)]

    def on_output(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Hook of the output projection."""
        mean = self.mean(output)
        return output + self.low * mean + self.high * (output - mean)


class _ScaledKind(Kind):
    def masked(self, options: dict[str, Any]) -> bool:
        return True

    def build(self, model: nn.Module, places: list[Place], options: dict[str, Any]) -> Built:
        made = []
        for place, _ in unique(places):
            remedy = self.one(model, place, weight_of(model, place), options)
            made.append((place, remedy, self.what))
        return installed(model, made)

    what: str

    def one(
        self, model: nn.Module, place: Place, like: Tensor, options: dict[str, Any]
    ) -> Remedy:
        """The remedy for one place."""
        raise NotImplementedError


class AttnScaleKind(_ScaledKind):
    name = "attnscale"
    what = "scales A V - J V by 1 + w_h"

    def one(
        self, model: nn.Module, place: Place, like: Tensor, options: dict[str, Any]
    ) -> Remedy:
        return AttnScale(place, like)


class CentredKind(_ScaledKind):
    name = "centred"
    what = "takes strength J V off A V"
    defaults: ClassVar[dict[str, Any]] = {"strength": 1.0}

    def check(self, options: dict[str, Any]) -> None:
        check_number("strength", options["strength"])

    def one(
        self, model: nn.Module, place: Place, like: Tensor, options: dict[str, Any]
    ) -> Remedy:
        return Centred(place, like, options["strength"])


class FeatScaleKind(_ScaledKind):
    name = "featscale"
    what = "scales J Z by 1 + s and Z - J Z by 1 + t"

    def one(
        self, model: nn.Module, place: Place, like: Tensor, options: dict[str, Any]
    ) -> Remedy:
        weight, transposed = row_map(output_of(model, place))
        return FeatScale(place, like, weight.shape[0 if transposed else 1])
