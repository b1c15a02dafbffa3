"""Reading recorded treatments: every field is checked against the dataclass that it is for."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.building import REMEDIES, Plan
from attoscope.remedies.places import Place, module_at
from attoscope.remedies.treatment import RECORD

# No model has more layers, heads or columns; a larger number would only fill the memory.
MOST = 2**24


def read_records(records: Any, model_name: str) -> list[Plan]:
    """The plans that a configuration records. Raises `AttoscopeError`, in one sentence, for
    anything that `Plan.record` does not write."""
    if not isinstance(records, list) or not records:
        raise _unread(model_name, RECORD, f"a list of treatments, got {_short(records)}")
    return [_plan(record, f"{RECORD}[{i}]", model_name) for i, record in enumerate(records)]


def _plan(record: Any, where: str, model_name: str) -> Plan:
    try:
        _check(record, dict, where)
        for name in ("remedy", "options", "places", "layers"):
            if name not in record:
                raise ValueError(f"{where} has no {name!r}")
        if not isinstance(record["remedy"], str) or record["remedy"] not in REMEDIES:
            known = ", ".join(sorted(REMEDIES))
            raise ValueError(f"{where}.remedy must be one of {known}, {_got(record['remedy'])}")
        _check(record["options"], dict, f"{where}.options")
        _check(record["places"], list, f"{where}.places")
        _check(record["layers"], int, f"{where}.layers")
        _check(record.get("split"), tuple[str, ...], f"{where}.split")
        kind = REMEDIES[record["remedy"]].place_type
        for i, place in enumerate(record["places"]):
            _check_fields(place, kind, f"{where}.places[{i}]")
        if not 0 < len(record["places"]) <= record["layers"]:
            raise ValueError(f"{where}.layers must be at least the number of places, and one")
        return Plan.of(record)
    except (ValueError, KeyError, TypeError, AttoscopeError) as error:
        raise _unread(model_name, None, str(error)) from error


def _unread(model_name: str, where: str | None, expected: str) -> AttoscopeError:
    what = expected if where is None else f"{where} must be {expected}"
    return AttoscopeError(
        f"{model_name}: config.json cannot be read: {what}; expected what this version of "
        "attoscope writes"
    )


def _check(value: Any, hint: Any, where: str) -> None:
    """Raise ValueError where plain data is not of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return
    if origin in (Union, types.UnionType):
        # Of all unions here the other side is None.
        if value is not None or type(None) not in args:
            _check(value, next(arg for arg in args if arg is not type(None)), where)
    elif origin is tuple:
        _check(value, list, where)
        endless = len(args) == 2 and args[1] is Ellipsis
        if not endless and len(value) != len(args):
            raise ValueError(f"{where} must have {len(args)} entries, {_got(value)}")
        for i, entry in enumerate(value):
            _check(entry, args[0 if endless else i], f"{where}[{i}]")
    elif dataclasses.is_dataclass(hint):
        _check_fields(value, hint, where)
    elif not _plain(value, origin or hint):
        named = getattr(origin or hint, "__name__", str(hint))
        raise ValueError(f"{where} must be a {_NAMES.get(named, named)}, {_got(value)}")


_NAMES = {
    "int": f"whole number from 0 to {MOST}",
    "float": "finite number",
    "str": "text",
    "bool": "true or false",
    "dict": "mapping",
    "NoneType": "null",
}


def _plain(value: Any, kind: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and 0 <= value <= MOST
    if kind is float:
        return isinstance(value, int | float) and abs(value) < 1e38 and not math.isnan(value)
    return isinstance(value, kind)


def _check_fields(value: Any, kind: Any, where: str) -> None:
    """A mapping with the fields of a dataclass and no other; those with a default may lack."""
    _check(value, dict, where)
    hints = get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name in value:
        if name not in known:
            raise ValueError(f"{where} has the unknown field {_short(name)}")
    for name, field in known.items():
        if name in value:
            _check(value[name], hints[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and (
            field.default_factory is dataclasses.MISSING
        ):
            raise ValueError(f"{where} has no {name!r}")


def _got(value: Any) -> str:
    return f"got {_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**38:
        return "a whole number of more than 38 digits"
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_sizes(model: nn.Module, plan: Plan) -> None:
    """The recorded heads against the projections of the model that is built."""
    for place in plan.places:
        if not isinstance(place, Place):
            continue
        heads, wide = place.heads, _columns(module_at(model, place.value), written=True)
        reads = _columns(module_at(model, place.output), written=False)
        last = heads.start + heads.stride * (heads.count - 1) + heads.size
        sizes = (heads.count, heads.size, heads.repeat, heads.stride)
        if min(sizes) < 1 or last > wide or heads.width != reads:
            raise AttoscopeError(
                f"{RECORD} in config.json cannot be read: its heads ({heads.count} of size "
                f"{heads.size}) do not fit {place.value} with {wide} columns; expected what this "
                "version of attoscope writes"
            )


def _columns(module: nn.Module, *, written: bool) -> int:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise AttoscopeError(
            f"{RECORD} in config.json cannot be read: it names a {type(module).__name__} as a "
            "projection, which is no linear map; expected what this version of attoscope writes"
        )
    stored_out_first = not isinstance(getattr(module, "nf", None), int)
    return weight.shape[0 if stored_out_first == written else 1]
