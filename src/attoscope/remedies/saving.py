"""Treated Hugging Face models on disk: `save_pretrained` as ever, and `load_treated` to read them.

A treated model's configuration holds its treatments as plain data, so that config.json says what to
do to a plain model before the weights are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.building import Plan, apply_plan
from attoscope.remedies.splitting import split_named
from attoscope.remedies.treatment import RECORD

DTYPES = ("auto", "float32", "float16", "bfloat16")


def load_treated(
    directory: str | Path, *, dtype: str = "auto", device: str = "cpu"
) -> nn.Module:
    """A treated Hugging Face model that `save_pretrained` wrote, with its treatments in place.

    The class is the one that config.json names; no code from the directory runs. Needs no data.
    The model is in evaluation mode, as `from_pretrained` gives it. `treatments_of` gives its
    treatments, to be undone or folded.

    Args:
        directory: where `save_pretrained` wrote to.
        dtype: "auto" (that of the checkpoint), "float32", "float16" or "bfloat16".
        device: where it goes.

    Raises `AttoscopeError` for a directory without a treated model, a class that transformers does
    not know, and weights that are missing, left over, or of another shape.
    """
    import transformers

    if dtype not in DTYPES:
        raise AttoscopeError(f"dtype: got {dtype!r}; expected one of {', '.join(DTYPES)}")
    if not (Path(directory) / "config.json").is_file():
        raise AttoscopeError(
            f"{directory}: got no config.json; expected a directory that save_pretrained wrote"
        )
    config = transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    if not getattr(config, RECORD, None):
        raise AttoscopeError(
            f"{directory}: its config.json records no treatment; expected a treated model that was "
            "saved with save_pretrained; load a plain one with from_pretrained"
        )
    names = getattr(config, "architectures", None) or []
    found = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    if found is None:
        raise AttoscopeError(
            f"{directory}: got the class {', '.join(names) or 'none'} in config.json; expected one "
            "of transformers, as no code from a directory runs"
        )
    made = treated_class(found, getattr(config, RECORD))
    model, info = made.from_pretrained(
        str(directory), config=config, dtype=dtype, output_loading_info=True
    )
    _judge(directory, info)
    model.__class__ = found
    loaded: nn.Module = model.to(device)
    return loaded


def treated_class(plain: Any, records: list[dict[str, Any]]) -> Any:
    """The model class, with recorded treatments put in as the model is built."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, config, *args, **kwargs)
        for held in {id(config): config, id(self.config): self.config}.values():
            if hasattr(held, RECORD):
                delattr(held, RECORD)
        for record in records:
            restore(self, record)

    exact = ["attoscope_.*strength"]
    if not any(record.get("options", {}).get("learnable") for record in records):
        exact.append("attoscope_.*shares")
    return type(plain.__name__, (plain,), {
        "__init__": build,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "_keep_in_fp32_modules_strict": [
            *(getattr(plain, "_keep_in_fp32_modules_strict", None) or ()), *exact
        ],
    })  # fmt: skip


def restore(model: nn.Module, record: dict[str, Any]) -> None:
    """Apply a recorded treatment to a plain model, without running it."""
    try:
        plan = Plan.of(record)
    except (KeyError, TypeError) as error:
        raise AttoscopeError(
            f"{RECORD} in config.json cannot be read ({type(error).__name__}: {error}); expected "
            "what this version of attoscope writes"
        ) from error
    split = split_named(model, plan.split)
    try:
        apply_plan(model, plan, split, notes=[])
    except BaseException:
        split.undo()
        raise


def _judge(directory: str | Path, info: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, info.get(kind) or ()))
        if keys:
            raise AttoscopeError(
                f"{directory}: got {len(keys)} {kind.replace('_', ' ')} ({', '.join(keys[:3])}); "
                "expected every tensor of the treated model and no other"
            )
