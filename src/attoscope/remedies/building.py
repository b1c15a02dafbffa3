"""From a plan, which is plain data, to a treated model: the step that loading repeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.admin import AdminKind
from attoscope.remedies.anchored import NeutrenoKind, ValueResidualKind
from attoscope.remedies.deepnet import DeepNetKind
from attoscope.remedies.deepscalelm import DeepScaleKind
from attoscope.remedies.gaussian import GaussianKind
from attoscope.remedies.kinds import Built, Kind, openers
from attoscope.remedies.places import module_at
from attoscope.remedies.scaled import AttnScaleKind, CentredKind, FeatScaleKind
from attoscope.remedies.spectral import SpectralKind
from attoscope.remedies.splitting import Split
from attoscope.remedies.treatment import RECORD, Change, Treatment, hold

_KINDS: tuple[Kind, ...] = (
    NeutrenoKind(), ValueResidualKind(), AttnScaleKind(), CentredKind(), FeatScaleKind(),
    SpectralKind(), AdminKind(), DeepNetKind(), GaussianKind(), DeepScaleKind(),
)  # fmt: skip
REMEDIES: dict[str, Kind] = {kind.name: kind for kind in _KINDS}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to a model: the remedy, its options, where, and of how many attention layers."""

    remedy: str
    options: dict[str, Any]
    places: tuple[Any, ...]
    layers: int
    split: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """The plan as plain data, for a configuration file."""
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()}
        places = [place.record() for place in self.places]
        return {
            "remedy": self.remedy,
            "options": options,
            "places": places,
            "layers": self.layers,
            "split": list(self.split),
        }

    @staticmethod
    def of(record: dict[str, Any]) -> Plan:
        """The plan that `record` wrote down."""
        # A name that is not known here is a KeyError, which loading puts in words.
        kind = REMEDIES[record["remedy"]]
        places = tuple(kind.place_type.of(place) for place in record["places"])
        options = kind.options(dict(record["options"]))
        split = tuple(record["split"])
        return Plan(record["remedy"], options, places, record["layers"], split)


def apply_plan(
    model: nn.Module, plan: Plan, split: Split, notes: list[str], *, fresh: bool = False
) -> Treatment:
    """Build the remedy where the plan says, and write the plan into the model's configuration.

    `fresh` lets it draw weights anew, which a model that is being loaded does not need.
    """
    _refuse_twice(model, plan)
    kind = REMEDIES[plan.remedy]
    back = kind.initialise(model, list(plan.places), plan.options) if fresh else _nothing
    try:
        built = kind.build(model, list(plan.places), plan.options)
    except BaseException:
        back()
        raise
    record = plan.record()
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        setattr(config, RECORD, [*(getattr(config, RECORD, None) or ()), record])

    def undo() -> None:
        built.undo()
        back()
        split.undo()

    def fold() -> None:
        assert built.fold is not None
        built.fold()
        split.undo()

    partial = kind.anchored and len(plan.places) < plan.layers
    anchors = len(openers(list(plan.places))) if partial else 0
    treatment = Treatment(
        model=model,
        remedy=plan.remedy,
        options=plan.options,
        changed=_changes(model, built),
        notes=(*split.notes, *built.notes, *notes),
        layers=(len(plan.places) - anchors, plan.layers),
        anchors=anchors,
        record=record,
        modules=tuple(module for _, module, _ in built.modules),
        counted=kind.counted,
        _undo=undo,
        _fold=None if built.fold is None else fold,
        handles=tuple(built.handles),
        backs=tuple(split.backs),
    )
    hold(model, treatment)
    return treatment


def _nothing() -> None:
    """The way back of what changed no weights."""


def _changes(model: nn.Module, built: Built) -> tuple[Change, ...]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(
        Change(place.attention, what, tuple(names[id(p)] for p in module.parameters()))
        for place, module, what in built.modules
    )


def _refuse_twice(model: nn.Module, plan: Plan) -> None:
    for place in plan.places:
        for module in module_at(model, place.attention)._modules.values():
            same = getattr(module, "kind", None) == plan.remedy
            if same and getattr(module, "place", place).value == place.value:
                raise AttoscopeError(
                    f"remedy: {plan.remedy!r} is in {place.attention or 'the model'} already; undo "
                    "that treatment first, or apply another remedy on top"
                )
