"""Load a model, its tokenizer and its image processor from a directory, a hub id or a GGUF file."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from attoscope.errors import AttoscopeError
from attoscope.trace.subject import Subject

DTYPES = ("auto", "float32", "float16", "bfloat16")
# Under this name a treated model's configuration records what was done to it.
_TREATED = "attoscope_treatments"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.index.json")


def load(source: str | Path, *, dtype: str, device: str, trust_remote_code: bool) -> Subject:
    """See `Subject.load`."""
    if dtype not in DTYPES:
        raise AttoscopeError(f"dtype: got {dtype!r}; expected one of {', '.join(DTYPES)}")
    target = _device(device)
    where, options = _locate(source)
    options["trust_remote_code"] = trust_remote_code
    with _quiet():
        config = _config(where, options, source)
        model, info = _weights(where, config, options, dtype, source)
        notes = _judge(info, source) + _gguf_note(options) + _treated_note(model)
        tokenizer = _with_words(_optional("AutoTokenizer", where, options))
        processor = _optional("AutoImageProcessor", where, options) if _sees(config) else None
    return Subject(
        model.to(target),
        tokenizer=tokenizer,
        image_processor=processor,
        name=_name(source),
        notes=notes,
    )


def _device(device: str) -> torch.device:
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise AttoscopeError(
            f"device {device!r} cannot be used here ({str(error).splitlines()[0][:120]}); "
            "give one that this machine has, such as cpu"
        ) from error
    return target


def _locate(source: str | Path) -> tuple[str, dict[str, Any]]:
    """A directory or hub id and the options that name a GGUF file in it."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            _need_gguf()
            return str(path.parent), {"gguf_file": path.name}
        raise AttoscopeError(
            f"{source} is a file that is no GGUF model; give the directory that holds "
            "config.json and the weights, or a .gguf file"
        )
    if path.is_dir():
        return _inside(path)
    looks_like_path = str(source).startswith((".", "/", "~")) or str(source).count("/") > 1
    if looks_like_path or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)):
        raise AttoscopeError(
            f"{source} does not exist; give a model directory, a GGUF file or a hub id"
        )
    return str(source), {}


def _inside(path: Path) -> tuple[str, dict[str, Any]]:
    if (path / "config.json").is_file():
        if not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
            raise AttoscopeError(
                f"{path} has a config.json but no weights (looked for {', '.join(_WEIGHTS)}); "
                "copy model.safetensors or pytorch_model.bin beside it"
            )
        return str(path), {}
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        _need_gguf()
        return str(path), {"gguf_file": files[0].name}
    found = f"{len(files)} GGUF files" if files else "neither config.json nor a GGUF file"
    raise AttoscopeError(
        f"{path} is no model directory: it holds {found}; expected config.json with weights, or "
        "give the one .gguf file"
    )


def _need_gguf() -> None:
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise AttoscopeError(
            "reading a GGUF file needs the packages gguf and accelerate, which are not "
            "installed; run: pip install 'attoscope[gguf]'"
        ) from error


def _config(where: str, options: dict[str, Any], source: str | Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(where, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AttoscopeError(
            f"{source}: its configuration cannot be read ({_sentence(error)}); expected a model "
            "that transformers knows, as a directory, hub id or GGUF file"
        ) from error


def _weights(
    where: str, config: Any, options: dict[str, Any], dtype: str, source: str | Path
) -> tuple[Any, dict[str, Any]]:
    import transformers

    names = getattr(config, "architectures", None) or []
    found = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    in_gguf = "gguf_file" in options
    model_class: Any = found or (
        transformers.AutoModelForCausalLM if in_gguf else transformers.AutoModel
    )
    records = getattr(config, _TREATED, None)
    if records and found is not None:
        # Only now, and only for such a model: remedies stand on the trace, not under it.
        from attoscope.remedies.saving import treated_class

        model_class = treated_class(found, records)
    # GGUF blocks are expanded to float32; their own type cannot be computed with.
    wanted = "float32" if dtype == "auto" and in_gguf else dtype
    try:
        model, info = model_class.from_pretrained(
            where, config=config, dtype=wanted, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise AttoscopeError(
            f"{source}: its weights cannot be loaded ({_sentence(error)}); expected a complete "
            "safetensors, pytorch_model.bin or GGUF checkpoint"
        ) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in (
            "safetensors",
            "safetensors_rust",
            "pickle",
            "_pickle",
        ):
            raise
        raise AttoscopeError(
            f"{source}: its weights file is damaged ({_sentence(error)}); copy it again"
        ) from error
    if records and found is not None:
        model.__class__ = found
    return model, info


def _judge(info: dict[str, Any], source: str | Path) -> tuple[str, ...]:
    """Missing weights inside a layer would be random: an error. Outside it, a note."""
    missing = sorted(info.get("missing_keys") or ())
    unexpected = sorted(info.get("unexpected_keys") or ())
    inside = [key for key in missing if re.search(r"\.\d+\.", key)]
    if inside:
        raise AttoscopeError(
            f"{source}: weights of its layers are missing from the checkpoint and would be random "
            f"({len(inside)}: {_some(inside)}); "
            + (f"it holds others instead ({len(unexpected)}: {_some(unexpected)}); "
               if unexpected else "")
            + "check that config.json belongs to these weights"
        )  # fmt: skip
    notes = []
    if missing:
        notes.append(
            f"missing from the checkpoint and set at random, outside the layers: {_some(missing)}"
        )
    if unexpected:
        notes.append(
            "in the checkpoint and not used by this architecture: "
            f"{_some(unexpected)} ({len(unexpected)})"
        )
    return tuple(notes)


def _gguf_note(options: dict[str, Any]) -> tuple[str, ...]:
    if "gguf_file" not in options:
        return ()
    return ("weights were expanded from the blocks of a GGUF file: they carry its rounding",)


def _treated_note(model: Any) -> tuple[str, ...]:
    records = getattr(model.config, _TREATED, None) or ()
    return tuple(
        f"treated with {record['remedy']}, as its config.json records" for record in records
    )


def _optional(kind: str, where: str, options: dict[str, Any]) -> Any:
    """A tokenizer or image processor if the model comes with one."""
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(where, **options)
    except Exception:  # whatever a foreign file makes it raise, the model can do without
        return None


def _with_words(tokenizer: Any) -> Any:
    """None for a tokenizer made up from nothing: it knows its special tokens and no word."""
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        return None
    return tokenizer


def _sees(config: Any) -> bool:
    return any(hasattr(config, name) for name in ("image_size", "vision_config", "patch_size"))


def _name(source: str | Path) -> str:
    path = Path(source)
    if not path.exists():
        return str(source)
    path = Path(os.path.abspath(path))  # not resolved: a link was named as it was for a reason
    # A folder called "model" says nothing: its parent does.
    generic = path.name.lower() in ("model", "models", "checkpoint", "final", "snapshots")
    return f"{path.parent.name}/{path.name}" if generic else path.name


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:240].rstrip(".:")


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading bars and warnings off: what matters of them is said in our own words.

    The bar of GGUF files, which take long, stays on a terminal.
    """
    from transformers.utils import logging as hf

    bars, level = hf.is_progress_bar_enabled(), hf.get_verbosity()
    hf.disable_progress_bar()
    hf.set_verbosity(logging.CRITICAL)
    watched = sys.stderr is not None and sys.stderr.isatty()
    try:
        with nullcontext() if watched else redirect_stderr(io.StringIO()):
            yield
    finally:
        hf.set_verbosity(level)
        if bars:
            hf.enable_progress_bar()
