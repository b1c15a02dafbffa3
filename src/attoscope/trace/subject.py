"""A model and how to feed it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.trace.frames import VisitorError, undisturbed
from attoscope.trace.layout import Layout, puts_time_first, queries_of_first_call, survey
from attoscope.trace.missed import refuse_kernels
from attoscope.trace.types import Batch

Feed = Callable[[nn.Module, Any], Any]
SURVEY_DOCUMENTS, SURVEY_TOKENS = 2, 24


class Subject:
    """A model, its tokenizer or image processor, and the callable that feeds it.

    Make one with `Subject.load` (a hub id, a directory or a GGUF file) or `Subject.of` (any
    `nn.Module`). The model is used as it is: no copy, no change that lasts.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        image_processor: Any = None,
        feed: Feed | None = None,
        name: str | None = None,
        notes: tuple[str, ...] = (),
        ignore: tuple[str, ...] = (),
    ) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise AttoscopeError(
                f"model: got a torch.jit module ({type(model).__name__}), whose inside cannot be "
                "watched; give the module that it was made from"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.name = name or type(model).__name__
        self.notes = notes
        self._feed = feed or call_model
        self._ignore = ignore
        self._layout: Layout | None = None
        self._batch_axis: int | None = None

    @classmethod
    def of(cls, model: nn.Module, **options: Any) -> Subject:
        """A subject from any module; `feed(model, inputs)` says how to run it on a batch.

        Options are those of the constructor. Without `feed`, a mapping is passed as keyword
        arguments, a tuple as positional ones, and a tensor alone.
        """
        return cls(model, **options)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> Subject:
        """A subject from a hub id, a local directory or a GGUF file.

        `dtype` is `auto` (the checkpoint's own), `float32`, `float16` or `bfloat16`. Weights are
        read from safetensors or with `weights_only`; code in a model directory runs only with
        `trust_remote_code`. Raises `AttoscopeError` when it is no model or weights are missing.
        """
        from attoscope.trace.loading import load

        return load(source, dtype=dtype, device=device, trust_remote_code=trust_remote_code)

    def run(self, batch: Batch) -> Any:
        """The model's output on a batch."""
        inputs = _moved(batch.inputs, self.device, self.dtype)
        try:
            return self._feed(self.model, inputs)
        except (AttoscopeError, VisitorError):
            raise
        except Exception as error:  # a foreign model may raise anything
            raise AttoscopeError(
                f"the model failed on this input ({type(error).__name__}: {_first_line(error)}); "
                f"inputs were {_describe(batch.inputs)}; check them against the model's forward"
            ) from error

    def takes(self, name: str, *, exactly: bool = False) -> bool:
        """Whether the forward pass takes an argument of that name (or, unless `exactly`, any)."""
        taken = inspect.signature(self.model.forward).parameters
        any_name = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        return name in taken or (any_name and not exactly)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokenizer's own tokens; an unknown word is a word, unless it shares its id."""
        if self.tokenizer is None:
            return frozenset()
        roles = ("bos", "eos", "cls", "sep", "pad", "mask")
        kept = {getattr(self.tokenizer, f"{role}_token_id", None) for role in roles}
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return frozenset(
            i for i in self.tokenizer.all_special_ids or () if i != unknown or i in kept
        )

    def layout(self, batch: Batch) -> Layout:
        """The model's stacks, found once, by running on a small part of the first batch."""
        refuse_kernels(self.model)  # also one that was put in after the survey
        if self._layout is None:
            small = head_of(batch)
            with undisturbed(self.model):
                found = survey(self.model, lambda: self.run(small), len(small), self._ignore)
            tokens = None if small.valid is None else small.valid.shape[1]
            self._layout = found.reading(tokens)
            if self._batch_axis == 1:
                self._layout = replace(self._layout, time_first=True)
        return self._layout

    def batch_axis(self, tensor: Tensor) -> int:
        """Which axis of a (…, …, width) input counts sequences, found by running on a piece.

        A piece of 5 × 3: attention that then has 5 queries reads time along the first axis.
        """
        if self._batch_axis is None:
            self._batch_axis = 1 if puts_time_first(self.model) else self._probed_axis(tensor)
        return self._batch_axis

    def _probed_axis(self, tensor: Tensor) -> int:
        whole = tuple(tensor.shape[:2])
        piece = (min(5, whole[0]), min(3, whole[1]))
        for rows, columns in dict.fromkeys((piece, whole)):
            if rows == columns:
                continue
            batch = Batch(tensor[:rows, :columns], tuple(range(rows)))
            try:
                with undisturbed(self.model):
                    queries = queries_of_first_call(partial(self.run, batch), rows)
            except AttoscopeError:
                continue  # a model for one length only: try it at that length
            if queries in (rows, columns):
                return int(queries == rows)
        return 0

    @property
    def config(self) -> Any:
        """The model's own configuration, or None."""
        return getattr(self.model, "config", None)

    @property
    def device(self) -> torch.device:
        """Where inputs go: the device of the first parameter (that of the embedding).

        Weights that are brought in layer by layer rest on the meta device; their hook says where
        they are computed with.
        """
        parameter = next(self.model.parameters(), None)
        if parameter is not None and parameter.device.type != "meta":
            return parameter.device
        hook = getattr(self.model, "_hf_hook", None)
        if parameter is not None and hook is None:
            raise AttoscopeError(
                f"the weights of {self.name} are on the meta device, that is, not there; load "
                "them first"
            )
        return torch.device(getattr(hook, "execution_device", None) or "cpu")

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating parameter, which floating inputs are cast to."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)


def subject_of(
    model: Any, *, dtype: str = "auto", device: str = "cpu", trust_remote_code: bool = False
) -> Subject:
    """A `Subject` from whatever names or is a model: a path, a hub id, a module, a `Subject`."""
    if isinstance(model, Subject):
        return model
    if isinstance(model, (str, Path)):
        return Subject.load(
            model, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
    if not isinstance(model, nn.Module):
        raise AttoscopeError(
            f"model: got {type(model).__name__}; expected a torch nn.Module, a directory, a hub "
            "id or a GGUF file"
        )
    return Subject.of(model)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run a model: mappings as keyword arguments (those that it takes), tuples as positional."""
    if isinstance(inputs, dict):
        taken = inspect.signature(model.forward).parameters
        extra = {}
        if "use_cache" in taken:
            extra["use_cache"] = False
        if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            return model(**inputs, **extra)
        return model(**{k: v for k, v in inputs.items() if k in taken}, **extra)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def head_of(
    batch: Batch, documents: int = SURVEY_DOCUMENTS, tokens: int = SURVEY_TOKENS
) -> Batch:
    """The first tokens of the longest documents of a batch; images keep all their patches.

    The longest, because causality cannot be seen in a text of one token.
    """
    size = len(batch)
    if batch.valid is None:
        rows = torch.arange(min(size, documents))
    else:
        rows = batch.valid.sum(1).argsort(descending=True, stable=True)[:documents]
    length = None if batch.valid is None else batch.valid.shape[1]
    other = None if batch.decoder_valid is None else batch.decoder_valid.shape[1]

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != size:
            return value
        value = value[rows.to(value.device)]
        if value.dim() >= 2 and value.shape[1] == length:
            return value[:, :tokens]
        if value.dim() >= 2 and value.shape[1] == other:
            # Another length than the encoder's, so that cross attention can be told apart.
            return value[:, : max(1, tokens - 1)]
        return value

    inputs = batch.inputs
    if isinstance(inputs, dict):
        inputs = {name: cut(value) for name, value in inputs.items()}
    elif batch.valid is not None:
        inputs = type(inputs)(map(cut, inputs)) if isinstance(inputs, tuple) else cut(inputs)
    else:
        return batch
    return replace(
        batch,
        inputs=inputs,
        documents=tuple(batch.documents[i] for i in rows.tolist()),
        valid=cut(batch.valid),
        special=cut(batch.special),
        decoder_valid=cut(batch.decoder_valid),
        tokens=None,
    )


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {k: _moved(v, device, dtype) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, device, dtype) for v in value)
    return value


def _describe(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')} {tuple(inputs.shape)}"
    if isinstance(inputs, dict):
        return ", ".join(f"{k}: {_describe(v)}" for k, v in inputs.items())
    if isinstance(inputs, (tuple, list)):
        return ", ".join(map(_describe, inputs))
    return type(inputs).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
