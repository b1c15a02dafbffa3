"""What the survey must not pass over in silence: layers and modules that attend unseen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.trace.capture import Capture
from attoscope.trace.frames import Frame

LOOKED_FOR = (
    "the attention registry of transformers, F.scaled_dot_product_attention (also inside "
    "nn.MultiheadAttention), and a softmax between two batched products or einsums"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one attention call looked like, without its tensors."""

    path: tuple[Frame, ...]
    queries: int
    crossing: bool
    heads: int
    key_heads: int
    causal: bool
    route: str


def refuse_kernels(model: nn.Module) -> None:
    """An error for attention that says of itself that it has no softmax (`softmax_free`)."""
    for name, module in model.named_modules():
        kernel = getattr(type(module), "softmax_free", None)
        if kernel is not None:
            raise AttoscopeError(
                f"{name.rpartition('.')[0] or 'the model'}: attends with a {kernel} kernel, which "
                "has no softmax and so cannot be read: attoscope's trace sees softmax attention "
                "alone; undo the treatment first"
            )


def plain_layers(
    entered: list[Frame],
    seen: list[Seen],
    members: dict[str, str],
    blocks: dict[str, str],
    ignore: tuple[str, ...],
) -> tuple[str, ...]:
    """Layers without a call; an attention module that ran unwatched is an error."""
    caught = {id(frame) for one in seen for frame in one.path}
    owners = {type(one.path[-1].module) for one in seen}
    missed = [
        frame
        for frame in entered
        if id(frame) not in caught
        and (type(frame.module) in owners or _looks_like_attention(frame.module))
        and not frame.name.startswith(ignore or ("\0",))
        and not any(frame.name.startswith(f"{one.path[-1].name}.") for one in seen)
    ]
    if missed:
        names = ", ".join(dict.fromkeys(f.name for f in missed[:4]))
        raise AttoscopeError(
            f"{len(missed)} attention module(s) ran without a call that could be watched "
            f"({names}; {type(missed[0].module).__name__}), while {len(seen)} calls were; looked "
            f"for {LOOKED_FOR}; load the model with attn_implementation='sdpa' or 'eager', or "
            "name them in `ignore` if they are not softmax attention"
        )
    return tuple(dict.fromkeys(name for name in members if name not in blocks))


def refuse_missed(
    model: nn.Module,
    seen: list[Seen],
    blocks: dict[str, str],
    plain: tuple[str, ...],
    unfinished: tuple[str, ...],
    ignore: tuple[str, ...],
) -> None:
    """An error for a layer without a call that is built like those that attend, or that took a
    softmax over scores."""
    kinds = {_build(model, name) for name in blocks}
    caught = {one.path[-1].name for one in seen}
    for name in plain:
        if name.startswith(ignore or ("\0",)):
            continue
        softmax = any(where == name or where.startswith(f"{name}.") for where in unfinished)
        if softmax or _build(model, name) in kinds:
            raise AttoscopeError(
                f"layer {name} ({type(model.get_submodule(name)).__name__}) made no attention call "
                f"that could be watched, while {len(caught)} modules did; looked for {LOOKED_FOR}; "
                "name it in `ignore` if it is not softmax attention"
            )


def _build(model: nn.Module, name: str) -> tuple[type, ...]:
    """The classes of a module and of everything in it."""
    return tuple(type(module) for module in model.get_submodule(name).modules())


def _looks_like_attention(module: nn.Module) -> bool:
    """By its class name, when it holds weights of its own to project with."""
    name = type(module).__name__.lower()
    if "attention" not in name and "attn" not in name:
        return False
    matrices = sum(p.dim() == 2 for p in module.parameters())
    return matrices >= 2


def nothing_found(model: nn.Module, capture: Capture) -> str:
    likely = [n for n, m in model.named_modules() if _looks_like_attention(m)]
    found = (
        f"{capture.softmaxes} softmax calls with three axes or more and modules named like "
        f"attention ({', '.join(likely[:3])})"
        if likely
        else f"{capture.softmaxes} softmax calls with three axes or more and no module named "
        "like attention"
    )
    advice = (
        "if it uses a fused kernel, load it with attn_implementation='sdpa'"
        if hasattr(model, "config")
        else "if it attends with a kernel of its own, call F.scaled_dot_product_attention instead"
    )
    return (
        f"no attention was seen in {type(model).__name__}: looked for {LOOKED_FOR}; found "
        f"{found}; attoscope watches softmax attention, so a model without it (an SSM, an MLP) has "
        f"nothing to show; {advice}"
    )
