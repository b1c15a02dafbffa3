"""The facts about model, data and method, in words; parts that are not known are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attoscope.report.words import count, number, size_of, visible

if TYPE_CHECKING:
    from attoscope.diagnosis import Diagnosis


def facts(diagnosis: Diagnosis) -> list[str]:
    """The line under the title: what was diagnosed, and on what."""
    model = diagnosis.model
    parts = [_text(model.get("architecture")), *_shape(model)]
    size = size_of(model.get("parameters"))
    if size:
        tied = ", output head tied to the embedding" if model.get("tied") else ""
        parts.append(f"{size} parameters{tied}")
    parts.append(_amount(diagnosis))
    parts.append(_text(model.get("dtype")).removeprefix("torch."))
    parts.append(_unchanged(model.get("unchanged") or {}))
    return [part for part in parts if part]


def _text(value: Any) -> str:
    return "" if value is None else visible(str(value))


def _shape(model: dict[str, Any]) -> list[str]:
    stacks = model.get("stacks") or [model]
    named = len(stacks) > 1
    return [text for stack in stacks if (text := _stack(stack, named))]


def _stack(stack: dict[str, Any], named: bool) -> str:
    layers, heads, key_heads = (stack.get(k) for k in ("layers", "heads", "key_heads"))
    if not layers or not heads:
        return ""
    shared = f" ({count(key_heads, 'key head')})" if key_heads not in (None, heads) else ""
    name = f"{_text(stack.get('name'))} " if named else ""
    return f"{name}{count(layers, 'layer')} × {count(heads, 'head')}{shared}"


def _amount(diagnosis: Diagnosis) -> str:
    documents, tokens = diagnosis.data.get("documents"), diagnosis.data.get("tokens")
    if documents is None:
        return ""
    noun = "image" if diagnosis.model.get("kind") == "vision" else "document"
    text = count(int(documents), noun)
    return text if tokens is None else f"{text}, {count(int(tokens), 'token')}"


def _unchanged(unchanged: dict[str, Any]) -> str:
    if unchanged.get("sentence"):
        return _text(unchanged["sentence"])
    gap = unchanged.get("max_difference")
    if gap is None:
        return ""
    state = "changed" if gap else "unchanged"
    return f"output {state} while watched (max difference {number(gap)})"


def data_facts(diagnosis: Diagnosis) -> list[str]:
    """What was read and what was left out: truncation, sampled rows, the null."""
    data = diagnosis.data
    lines = []
    if _amount(diagnosis):
        longest = data.get("max_tokens")
        limit = f", at most {count(int(longest), 'token')} each" if longest else ""
        lines.append(f"Read: {_amount(diagnosis)}{limit}.")
    if data.get("truncated_documents") == 0 and data.get("tokens"):
        lines.append("No document was cut.")
    if data.get("rows"):
        lines.append(f"Query rows read: {_text(data['rows'])}.")
    if data.get("null"):
        lines.append(f"Null: {_text(data['null'])}.")
    if data.get("loss"):
        lines.append(f"Loss: {_text(data['loss'])}.")
    sources = data.get("sources") or []
    if sources:
        shown = ", ".join(_text(each) for each in sources[:5])
        more = f" and {len(sources) - 5:,} more" if len(sources) > 5 else ""
        lines.append(f"From {shown}{more}.")
    return lines + notes(data)


def notes(facts_of: dict[str, Any]) -> list[str]:
    """The notes on model or data, as sentences."""
    found = [_text(note).strip() for note in facts_of.get("notes") or []]
    return [f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in found if note]


def method_facts(diagnosis: Diagnosis) -> list[str]:
    """How the model was watched."""
    model = diagnosis.model
    lines = []
    routes = model.get("routes") or {}
    if routes:
        caught = ", ".join(
            f"{_text(amount)} by {_text(name)}" for name, amount in routes.items()
        )
        lines.append(f"Attention calls caught: {caught}.")
    where = [_text(model.get(key)) for key in ("dtype", "device") if model.get(key)]
    if where:
        lines.append(f"The model ran in {' on '.join(where)}; statistics are kept in float64.")
    return lines + notes(model)
