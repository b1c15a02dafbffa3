"""The null of most readings: the same tokens, or patches, of each document in random order.

It shows what the weights do with these tokens when their order says nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attoscope.trace.subject import Subject
from attoscope.trace.types import Batch

# Inputs that hold one thing per token and may be permuted; masks, types and positions may not.
_CONTENT = (
    "input_ids",
    "inputs_embeds",
    "decoder_input_ids",
    "src",
    "pixel_values",
    "x",
    "idx",
)


def shuffled(subject: Subject, batch: Batch, seed: int) -> Batch | None:
    """The same tokens (or patches) of each document in random order; special tokens stay.

    The null of most readings: what the weights do with these tokens when their order says
    nothing. None where it is not known what a token is.
    """
    inputs = batch.inputs
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.dim() == 3:
        return replace(batch, inputs=_shuffled_floats(subject, batch, inputs, seed))
    if not isinstance(inputs, dict):
        return None
    moved = {k: v for k, v in inputs.items() if k in _CONTENT and isinstance(v, Tensor)}
    if not moved:
        return None
    out = dict(inputs)
    for name, value in moved.items():
        if name == "pixel_values":
            patches = _shuffled_patches(subject, batch, value, seed)
            if patches is None:
                return None
            out[name] = patches
            continue
        of_decoder = name.startswith("decoder")
        valid = batch.decoder_valid if of_decoder else batch.valid
        special = None if of_decoder else batch.special
        out[name] = _shuffled_rows(value, valid, special, batch.documents, seed, of_decoder)
    return replace(batch, inputs=out)


def _shuffled_rows(
    value: Tensor,
    valid: Tensor | None,
    special: Tensor | None,
    documents: tuple[int, ...],
    seed: int,
    keep_first: bool,
) -> Tensor:
    value = value.clone()
    for row, document in enumerate(documents):
        movable = torch.ones(value.shape[1], dtype=torch.bool)
        if valid is not None:
            movable &= valid[row].cpu()
        if special is not None:
            movable &= ~special[row].cpu()
        if keep_first:
            movable[0] = False
        places = movable.nonzero()[:, 0]
        order = torch.randperm(len(places), generator=_generator(seed, document))
        value[row, places] = value[row, places[order]]
    return value


def _shuffled_floats(subject: Subject, batch: Batch, inputs: Tensor, seed: int) -> Tensor:
    """Vectors of each sequence in random order, whichever axis counts sequences."""
    flip = subject.batch_axis(inputs) == 1
    rows = inputs.transpose(0, 1) if flip else inputs
    mixed = _shuffled_rows(rows, None, None, batch.documents, seed, False)
    return mixed.transpose(0, 1) if flip else mixed


def _shuffled_patches(
    subject: Subject, batch: Batch, pixels: Tensor, seed: int
) -> Tensor | None:
    patch = getattr(subject.config, "patch_size", None)
    side = patch[0] if isinstance(patch, (tuple, list)) else patch
    if not isinstance(side, int) or pixels.dim() != 4:
        return None
    if pixels.shape[2] % side or pixels.shape[3] % side:
        return None
    columns = pixels.shape[3] // side
    patches = torch.nn.functional.unfold(pixels.float(), side, stride=side)
    for row, document in enumerate(batch.documents):
        order = torch.randperm(patches.shape[-1], generator=_generator(seed, document))
        patches[row] = patches[row][:, order]
    size = (patches.shape[-1] // columns * side, columns * side)
    return torch.nn.functional.fold(patches, size, side, stride=side).to(pixels.dtype)


def _generator(seed: int, document: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + document) % 2**63)
