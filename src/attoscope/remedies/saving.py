"""Treated Hugging Face models on disk: `save_pretrained` as ever, and `load_treated` to read them.

A treated model's configuration holds its treatments as plain data, so that config.json says what to
do to a plain model before the weights are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.building import Plan, apply_plan
from attoscope.remedies.records import check_sizes, read_records
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
    _check_directory(directory)
    with _reading(directory):
        config = transformers.AutoConfig.from_pretrained(
            str(directory), trust_remote_code=False
        )
    found = _class_of(directory, getattr(config, "architectures", None))
    made = treated_class(found, getattr(config, RECORD, None), where=str(directory))
    with _reading(directory):
        model, info = made.from_pretrained(
            str(directory), config=config, dtype=dtype, output_loading_info=True
        )
    _judge(directory, info)
    model.__class__ = found
    loaded: nn.Module = model.to(device)
    return loaded


def _check_directory(directory: Any) -> None:
    """A config.json that is a mapping and records a treatment, or a sentence."""
    if not isinstance(directory, str | Path):
        raise AttoscopeError(
            f"directory: got {type(directory).__name__}, which cannot be read; expected the path "
            "of a directory that save_pretrained wrote"
        )
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise AttoscopeError(
            f"{directory}: got no config.json; expected a directory that save_pretrained wrote"
        )
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(directory, error) from error
    if not isinstance(held, dict):
        raise AttoscopeError(
            f"{directory}: config.json cannot be read: got a {type(held).__name__}; expected a "
            "mapping, as save_pretrained writes it"
        )
    if RECORD not in held or held[RECORD] in (None, []):
        raise AttoscopeError(
            f"{directory}: its config.json records no treatment; expected a treated model that was "
            "saved with save_pretrained; load a plain one with from_pretrained"
        )


def _class_of(directory: Any, names: Any) -> Any:
    """The model class of transformers that a configuration names, or a sentence."""
    import transformers

    held = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    for name in held:
        found = getattr(transformers, name, None)
        if _is_model(found):
            return found
    raise AttoscopeError(
        f"{directory}: got the class {', '.join(held) or 'none'} in config.json; expected a model "
        "of transformers, as no code from a directory runs"
    )


def _is_model(found: Any) -> bool:
    import transformers

    return isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)


@contextmanager
def _reading(directory: Any) -> Iterator[None]:
    """What transformers cannot read is said in one sentence."""
    try:
        yield
    except AttoscopeError:
        raise
    except Exception as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Any, error: Exception) -> AttoscopeError:
    said = " ".join(str(error).split())
    said = said if len(said) <= 160 else f"{said[:160]}…"
    return AttoscopeError(
        f"{directory} cannot be read: {type(error).__name__}: {said}; expected config.json and "
        "weights as save_pretrained writes them"
    )


def treated_class(plain: Any, records: Any, *, where: str = "model") -> Any:
    """The model class, with recorded treatments put in as the model is built.

    Raises `AttoscopeError` for what is no model class of transformers, and for records that cannot
    be read (in the words of `where`).
    """
    if not _is_model(plain):
        raise AttoscopeError(
            f"{where}: got {getattr(plain, '__name__', plain)!r} in config.json; expected a model "
            "class of transformers"
        )
    plans = read_records(records, where)

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, config, *args, **kwargs)
        for held in {id(config): config, id(self.config): self.config}.values():
            if hasattr(held, RECORD):
                delattr(held, RECORD)
        for plan in plans:
            restore(self, plan)

    exact = ["attoscope_.*strength"]
    if not any(plan.options.get("learnable") for plan in plans):
        exact.append("attoscope_.*shares")
    return type(plain.__name__, (plain,), {
        "__init__": build,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "_keep_in_fp32_modules_strict": [
            *(getattr(plain, "_keep_in_fp32_modules_strict", None) or ()), *exact
        ],
    })  # fmt: skip


def restore(model: nn.Module, plan: Plan) -> None:
    """Apply a recorded treatment to a plain model, without running it."""
    split = split_named(model, plan.split)
    try:
        check_sizes(model, plan)
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
