"""A model from its configuration alone: whole where it is small, else a few layers of its width."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.trace.memory import parameter_count
from attoscope.trace.subject import Subject
from attoscope.trace.types import Batch

# Larger models are built with a few layers; 400 MB of float32.
WHOLE = 100_000_000
FEW = 2
# More than this is not built even so: 8 GB.
_MOST = 2_000_000_000
_LAYERS = "num_hidden_layers"


@dataclass(frozen=True, slots=True)
class Built:
    """A model built from a configuration: `layers` it should have, of which `made` were built."""

    subject: Subject
    layers: int | None
    made: int | None
    parameters: int

    @property
    def whole(self) -> bool:
        """Whether all layers are there."""
        return self.layers == self.made

    @property
    def sentence(self) -> str:
        """What was built, in words."""
        if self.whole:
            return f"built whole with fresh weights ({self.parameters:,} parameters)"
        return (
            f"built {self.made} of {self.layers} layers ({self.parameters:,} parameters in all); "
            "the others are taken to be initialised as the last of them, and nothing but the input "
            "was measured"
        )


def is_configuration(model: Any) -> bool:
    """Whether it is a configuration: an object, a JSON file, or a directory without weights."""
    if isinstance(model, (str, Path)):
        path = Path(model).expanduser()
        if path.is_file():
            return path.suffix == ".json"
        from attoscope.trace.loading import _WEIGHTS

        bare = path.is_dir() and not any(any(path.glob(pattern)) for pattern in _WEIGHTS)
        return bare and (path / "config.json").is_file()
    return hasattr(model, "to_diff_dict") and hasattr(model, "model_type")


def build(model: Any, *, whole: int = WHOLE, seed: int = 0) -> Built:
    """The model that a configuration describes, with fresh weights of its own initialiser.

    With more than `whole` parameters only the first `FEW` layers are made, of the same width and
    initialised as layers of the full depth are. Code that a configuration names is never run.
    Raises `AttoscopeError` where transformers does not know the architecture.
    """
    config = _read(model)
    name = Path(model).name if isinstance(model, (str, Path)) else type(config).__name__
    with _quietly(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.device("meta"):
            parameters = parameter_count(_make(config))
        layers = getattr(config, _LAYERS, None)
        deep = isinstance(layers, int) and layers > FEW
        small = parameters <= whole or not deep
        made = _make(config) if small else _shortened(config, int(layers or 0))
    subject = Subject.of(made.eval(), name=name, tokenizer=_tokenizer(model))
    return Built(subject, layers, layers if small else FEW, parameters)


def _read(model: Any) -> Any:
    from transformers import AutoConfig

    if not isinstance(model, (str, Path)):
        return model
    try:
        return AutoConfig.from_pretrained(str(Path(model).expanduser()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise AttoscopeError(
            f"{model}: its configuration cannot be read ({lines[0][:160]}); expected the "
            "config.json of a model that transformers knows"
        ) from error


def _make(config: Any) -> nn.Module:
    """The class that the configuration names where transformers has it; else the bare model."""
    import transformers

    names = getattr(config, "architectures", None) or []
    found = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    try:
        if found is not None:
            made: nn.Module = found(copy.deepcopy(config))
            return made
        made = transformers.AutoModel.from_config(copy.deepcopy(config))
        return made
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise AttoscopeError(
            f"a model of type {getattr(config, 'model_type', '?')} cannot be built from this "
            f"configuration ({lines[0][:160]}); check its sizes"
        ) from error


def _shortened(config: Any, layers: int) -> nn.Module:
    """A few layers, initialised as those of the full depth are."""
    short = copy.deepcopy(config)
    setattr(short, _LAYERS, FEW)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        listed = getattr(short, name, None)
        if isinstance(listed, (list, tuple)) and len(listed) == layers:
            setattr(short, name, list(listed)[:FEW])
    with torch.device("meta"):
        size = parameter_count(_make(short))
    if size > _MOST:
        raise AttoscopeError(
            f"{FEW} layers and the embedding of this model have {size:.2g} parameters, more than "
            f"the {_MOST:.2g} that are built here; give a configuration with a smaller vocabulary "
            "or width"
        )
    made: Any = _make(short)
    setattr(made.config, _LAYERS, layers)
    # Some classes scale weights by the depth, so the weights are drawn again with it known.
    for part in (*made.modules(), *made.parameters(), *made.buffers()):
        if hasattr(part, "_is_hf_initialized"):
            del part._is_hf_initialized
    made.initialize_weights()
    setattr(made.config, _LAYERS, FEW)
    return made  # type: ignore[no-any-return]


def _tokenizer(model: Any) -> Any:
    """The tokenizer that lies beside a configuration, or None."""
    if not isinstance(model, (str, Path)):
        return None
    path = Path(model).expanduser()
    folder = path if path.is_dir() else path.parent
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError):
        return None


def synthetic_batch(built: Built, documents: int, tokens: int, seed: int = 0) -> Batch:
    """Documents to read where there are none: token ids with Zipf frequencies, or Gaussian pixels.

    Frequencies are p_v ~ 1/v with the vocabulary in a random order, so that words repeat as they
    do in text; nothing else of text is in them.
    """
    config = built.subject.config
    rng = np.random.default_rng(seed)
    numbers = tuple(range(documents))
    side, vocabulary = getattr(config, "image_size", None), getattr(config, "vocab_size", None)
    if side is not None and getattr(config, "num_channels", None) and vocabulary is None:
        high, wide = (side, side) if isinstance(side, int) else side
        pixels = rng.standard_normal((documents, config.num_channels, high, wide))
        return Batch({"pixel_values": torch.from_numpy(pixels).float()}, numbers)
    if not isinstance(vocabulary, int):
        raise AttoscopeError(
            f"{built.subject.name}: its configuration names neither a vocabulary nor an image "
            "size, so no input can be made for it; give data"
        )
    limit = getattr(config, "max_position_embeddings", None)
    tokens = min(tokens, limit - 2) if isinstance(limit, int) and limit > 4 else tokens
    p = 1 / np.arange(1, vocabulary + 1)
    ids = rng.permutation(vocabulary)[
        rng.choice(vocabulary, (documents, tokens), p=p / p.sum())
    ]
    pad = getattr(config, "pad_token_id", None)
    ids = np.where(ids == pad, (ids + 1) % vocabulary, ids) if isinstance(pad, int) else ids
    valid = torch.ones(documents, tokens, dtype=torch.bool)
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": valid.long()}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"].clone()
    return Batch(inputs, numbers, valid)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what transformers says about a configuration's token ids."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
