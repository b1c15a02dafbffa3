"""`nn.MultiheadAttention` with projections that are modules, so that a remedy can sit between them.

Torch's own module projects with one fused matrix inside a function, and its encoder layers pass
over it on a fast path. The module here computes the same from four linear maps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.places import module_at
from attoscope.trace import Batch, Layer, Subject, watch


class SplitAttention(nn.MultiheadAttention):
    """Self-attention with modules `query`, `key`, `value` and `out_proj` for its projections.

    It stays an `nn.MultiheadAttention` for code that asks, with the attributes that keep torch's
    encoder layers off their fast path. `users` counts the treatments that need it.
    """

    def __init__(self, source: nn.MultiheadAttention) -> None:
        nn.Module.__init__(self)
        self.embed_dim = self.kdim = self.vdim = source.embed_dim
        self._qkv_same_embed_dim = False
        self.num_heads, self.head_dim = source.num_heads, source.head_dim
        self.dropout, self.batch_first = source.dropout, source.batch_first
        self.bias_k = self.bias_v = None
        self.add_zero_attn = False
        self.register_parameter("in_proj_bias", None)
        self.users = 0
        # What is put back on undo; in a tuple, so that it is no submodule. A copy has none.
        self.source: tuple[nn.MultiheadAttention, ...] = (source,)
        self.nests: tuple[nn.Module, ...] = ()
        self.training = source.training
        weights = source.in_proj_weight.chunk(3)
        biases = (None,) * 3 if source.in_proj_bias is None else source.in_proj_bias.chunk(3)
        made = [_linear(w, b, source) for w, b in zip(weights, biases, strict=True)]
        self.query, self.key, self.value = made
        self.out_proj = source.out_proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        unbatched = query.dim() == 2
        if unbatched:
            axis = 0 if self.batch_first else 1
            query, key, value = (x.unsqueeze(axis) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = (self.query(query), self.key(key), self.value(value))
        q, k, v = (self._heads(x) for x in (q, k, v))
        mask = _merged(key_padding_mask, attn_mask, q)
        output, weights = self._attend(q, k, v, mask, need_weights)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights[0] if unbatched else weights
        output = output.permute(0, 2, 1, 3) if self.batch_first else output.permute(2, 0, 1, 3)
        output = self.out_proj(output.flatten(2))
        return output.squeeze(0 if self.batch_first else 1) if unbatched else output, weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs, and the weights where they are asked for."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout), None
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        weights = F.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return weights @ v, weights

    def _heads(self, projected: Tensor) -> Tensor:
        parts: Tensor = projected.unflatten(-1, (self.num_heads, self.head_dim))
        return parts.permute(0, 2, 1, 3) if self.batch_first else parts.permute(1, 2, 0, 3)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"source": (), "nests": ()}

    @torch.no_grad()
    def write_back(self, source: nn.MultiheadAttention) -> None:
        """Copy the weights into the fused matrices of the module that it was made from."""
        parts = (self.query, self.key, self.value)
        for part, weight in zip(parts, source.in_proj_weight.chunk(3), strict=True):
            weight.copy_(part.weight)
        if source.in_proj_bias is not None:
            for part, bias in zip(parts, source.in_proj_bias.chunk(3), strict=True):
                bias.copy_(part.bias)
        source.train(self.training)


def _linear(weight: Tensor, bias: Tensor | None, source: nn.MultiheadAttention) -> nn.Linear:
    width = weight.shape[1]
    made = nn.Linear(width, width, bias is not None, device="meta", dtype=weight.dtype)
    for name, part, fused in (
        ("weight", weight, source.in_proj_weight),
        ("bias", bias, source.in_proj_bias),
    ):
        if part is not None:
            copy = nn.Parameter(part.detach().clone(), requires_grad=fused.requires_grad)
            setattr(made, name, copy)
    return made.train(source.training)


def _merged(padding: Tensor | None, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Both masks as one that is added to the scores, (batch, 1 or head, 1 or query, key)."""
    batch, heads, length, _ = query.shape
    total: Tensor | None = None
    if mask is not None:
        total = _additive(mask, query)
        grouped = total.dim() == 3
        total = total.view(batch, heads, length, -1) if grouped else total[None, None]
    if padding is not None:
        keys = _additive(padding, query)[:, None, None]
        total = keys if total is None else total + keys
    return total


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))


@dataclass(slots=True)
class Split:
    """The attention modules that were replaced for one treatment; `undo` puts them back."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    backs: list[Back] = field(default_factory=list)

    def undo(self) -> None:
        """Put the modules back that no other treatment needs, weights copied."""
        while self.backs:
            self.backs.pop().remove()


@dataclass(slots=True)
class Back:
    """The way back for one replaced module; a copy of the model has one of its own."""

    ours: SplitAttention
    holder: nn.Module
    child: str
    nests: tuple[nn.Module, ...]

    def remove(self) -> None:
        """Put the fused module back, weights copied, where no other treatment needs the split."""
        self.ours.users -= 1
        if self.ours.users:
            return
        source = self.ours.source[0] if self.ours.source else _fused(self.ours)
        self.ours.write_back(source)
        self.holder._modules[self.child] = source
        for encoder in self.nests:
            if not any(isinstance(m, SplitAttention) for m in encoder.modules()):
                encoder.use_nested_tensor = True  # type: ignore[assignment]


def _fused(ours: SplitAttention) -> nn.MultiheadAttention:
    """A fused module for a copy, which has not kept the one that it was made from."""
    weight, bias = ours.query.weight, ours.query.bias
    made = nn.MultiheadAttention(
        ours.embed_dim, ours.num_heads, ours.dropout, bias is not None,
        batch_first=ours.batch_first, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    made.in_proj_weight.requires_grad_(weight.requires_grad)
    if bias is not None:
        made.in_proj_bias.requires_grad_(bias.requires_grad)
    made.out_proj = ours.out_proj
    return made


def split_attention(subject: Subject, batch: Batch) -> Split:
    """Replace every `nn.MultiheadAttention` that attends to itself in a run on the batch."""
    names: list[str] = []
    held = {n for n, m in subject.model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    if not held:
        return Split()

    def visit(layer: Layer, _: Batch) -> None:
        for call in layer.calls:
            if call.module in held and not call.site.call.startswith("cross"):
                names.append(call.module)

    watch(subject, batch, visit)
    return split_named(subject.model, tuple(dict.fromkeys(names)))


def split_named(model: nn.Module, names: tuple[str, ...]) -> Split:
    """Replace the attention modules of these names."""
    split = Split(names)
    try:
        new = [name for name in names if _replace(model, name, split)]
    except AttoscopeError:
        split.undo()
        raise
    if new:
        split.notes = (
            f"{len(new)} nn.MultiheadAttention modules (first: {new[0]}) have four projections of "
            "their own now; undo puts the fused ones back, with the weights copied",
        )
    return split


def _replace(model: nn.Module, name: str, split: Split) -> bool:
    """Whether the module was replaced just now, and not for an earlier treatment."""
    parent, _, child = name.rpartition(".")
    source = module_at(model, name)
    fresh = not isinstance(source, SplitAttention)
    if fresh:
        if not name:
            raise AttoscopeError(
                "model: got an nn.MultiheadAttention itself, which cannot be replaced in place; "
                "expected a module that holds it"
            )
    ours = (
        SplitAttention(source)
        if isinstance(source, nn.MultiheadAttention) and fresh
        else source
    )
    if not isinstance(ours, SplitAttention):
        raise AttoscopeError(
            f"{name}: got a {type(ours).__name__}; expected an nn.MultiheadAttention, the one that "
            "the treatment was made for"
        )
    holder = module_at(model, parent)
    if fresh:
        holder._modules[child] = ours
        ours.nests = _without_nesting(model, name)
    ours.users += 1
    split.backs.append(Back(ours, holder, child, ours.nests))
    return fresh


def _without_nesting(model: nn.Module, name: str) -> tuple[nn.Module, ...]:
    """Encoders around a module that would nest their input for the fast path: now they do not."""
    around = [n for n, _ in model.named_modules() if name.startswith(f"{n}." if n else "")]
    found = [module_at(model, n) for n in around]
    # The one that was told so for another layer of it is found by what it was told.
    nests = tuple(
        m for m in found
        if getattr(m, "use_nested_tensor", False)
        or any(m in s.nests for s in m.modules() if isinstance(s, SplitAttention))
    )  # fmt: skip
    for module in nests:
        module.use_nested_tensor = False  # type: ignore[assignment]
    return nests
