"""Attention with a Gaussian kernel in place of the softmax: in plain tensors and in live models.

The weight of a key is `exp(-|q - k|^2 / (2 sqrt(d)))`: from 0 to 1, and rows are not divided by
their sum. Sources: Skyformer (arXiv 2111.00035), whose code has this kernel and bandwidth; arXiv
2411.07538, which compares it with softmax.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.finding import Found, find_places
from attoscope.remedies.kinds import Built, Kind, check_choice, installed, unique, weight_of
from attoscope.remedies.places import Place, module_at
from attoscope.remedies.splitting import SplitAttention
from attoscope.remedies.taps import PREFIX, Remedy
from attoscope.trace import AttentionCall, Batch, Layer, Subject, watch
from attoscope.trace.types import FORBIDDEN

NAME = "gaussian"
REGISTERED = f"{PREFIX}{NAME}"
# A row that sums to less gives no output and no gradient worth the name in float32.
DEAD = 1e-6


class Attended(NamedTuple):
    """What `gaussian_attention` gives: outputs, and how much weight every query had to give.

    `row_sum` is from 0 (no key is near: output and gradient vanish) to the number of keys (all
    keys equal the query). A softmax would have 1 everywhere.
    """

    output: Float[Tensor, "batch head query value_size"]
    weights: Float[Tensor, "batch head query key"]
    row_sum: Float[Tensor, "batch head query"]

    @property
    def least_row_sum(self) -> float:
        """The least row sum of all queries."""
        return float(self.row_sum.detach().min())


def gaussian_attention(
    query: Float[Tensor, "batch head query size"],
    key: Float[Tensor, "batch group key size"],
    value: Float[Tensor, "batch group key value_size"],
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | Float[Tensor, "heads 1 1"] | None = None,
    normalize: bool = False,
) -> Attended:
    """`S V` with `S_ij = exp(-scale |q_i - k_j|^2 / 2)`, scale 1/sqrt(d): no division by row sums.

    Args:
        query, key, value: by head; `group` divides `head` (grouped heads).
        mask: (batch, key), or anything that broadcasts to (batch, head, query, key). True allows;
            numbers are added to the exponent, -4096 and below forbid.
        causal: query i sees keys 0 to i only.
        dropout: share of weights dropped, the others scaled up. Row sums are those before it.
        scale: a number or one per head, (head, 1, 1); bandwidth `1 / sqrt(scale)`.
        normalize: divide by the row sums. That is another kernel: softmax with a bias by the norm
            of the keys, and with softmax's rank defect (`prediction.trainability.row_jacobian`).

    Output grows with the number of keys near a query, and dies where there are none: look at
    `Attended.least_row_sum`. A query that may see no key gives 0. Half precision is computed in
    float32.

    Raises `AttoscopeError` for a mask that fits no keys, or dropout outside [0, 1).

    Source: arXiv 2111.00035 and its code; that arXiv 2411.07538 has the same bandwidth is assumed.
    """
    if not 0 <= dropout < 1:
        raise AttoscopeError(f"dropout: got {dropout}; expected a share from 0 to below 1")
    weights = gaussian_weights(
        query, key, mask, causal=causal, scale=scale, normalize=normalize
    )
    used = F.dropout(weights, dropout) if dropout else weights
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return Attended(used.to(value.dtype) @ value, weights, weights.sum(-1))


def gaussian_weights(
    query: Float[Tensor, "batch head query size"],
    key: Float[Tensor, "batch group key size"],
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | Float[Tensor, "heads 1 1"] | None = None,
    normalize: bool = False,
) -> Float[Tensor, "batch head query key"]:
    """The weights of `gaussian_attention`, in float32 at least; forbidden keys have exactly 0."""
    exact = torch.promote_types(query.dtype, torch.float32)
    repeat = query.shape[1] // key.shape[1]
    key = (key if repeat == 1 else key.repeat_interleave(repeat, 1)).to(exact)
    # Distances stay as they are when all are moved; near 0 they lose less to rounding.
    origin = key[..., :1, :].detach()
    query, key = query.to(exact) - origin, key - origin
    apart = query.square().sum(-1, keepdim=True) + key.square().sum(-1)[..., None, :]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    exponent = scale * (query @ key.mT - apart / 2).clamp(max=0)
    visible, bias = _read_mask(mask, causal, exponent)
    exponent = exponent if bias is None else exponent + bias
    if visible is not None:
        exponent = exponent.masked_fill(~visible, torch.finfo(exact).min)
    weights = exponent.softmax(-1) if normalize else exponent.exp()
    return weights if visible is None else weights.masked_fill(~visible, 0.0)


def _read_mask(
    mask: Tensor | None, causal: bool, like: Float[Tensor, "batch head query key"]
) -> tuple[Bool[Tensor, "batches heads queries key"] | None, Tensor | None]:
    """Which keys are visible (None: all), and what is added to the exponent."""
    queries, keys = like.shape[-2:]
    visible: Tensor | None = None
    bias = None
    if mask is not None:
        mask = mask[:, None, None] if mask.dim() == 2 else mask
        if mask.dim() != 4 or not _broadcasts(mask.shape, like.shape):
            raise AttoscopeError(
                f"mask: got shape {tuple(mask.shape)}; expected (batch, key) or what broadcasts to "
                f"(batch, head, query, key) = {tuple(like.shape)}"
            )
        if mask.is_floating_point():
            visible = mask > FORBIDDEN
            bias = mask.to(like.dtype).masked_fill(~visible, 0.0)
        else:
            visible = mask != 0
        visible = visible.expand(*visible.shape[:3], keys)
    if causal:
        triangle = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril()
        visible = triangle[None, None] if visible is None else visible & triangle
    return visible, bias


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    return all(a in (1, b) for a, b in zip(shape, target, strict=True))


class GaussianKernel(Remedy):
    """The kernel of one attention module, called in place of its softmax.

    With `learnable`, `log_width` (head) is a parameter, 0 at the start: distances are divided by
    `exp(log_width)`. `least_row_sum` is that of the last pass, padding left out.
    """

    kind = NAME
    # Read by the trace, which says that it cannot see such attention.
    softmax_free: ClassVar[str] = "Gaussian"
    transient: ClassVar[tuple[str, ...]] = ("least_row_sum",)

    def __init__(
        self, place: Place, like: Tensor, *, normalize: bool = False, learnable: bool = False
    ) -> None:
        super().__init__(place)
        self.normalize = normalize
        self.least_row_sum: Tensor | None
        heads = place.heads.count * place.heads.repeat
        start = torch.zeros(heads, device=like.device, dtype=like.dtype)
        self.log_width = nn.Parameter(start) if learnable else None

    def attach(self, model: nn.Module) -> list[Any]:
        """Lead the attention module's calls here."""
        module = module_at(model, self.place.attention)
        if isinstance(module, SplitAttention):
            return [Swapped(module, "__class__", GaussianSelfAttention)]
        register()
        config = copy.copy(module.config)
        # Of this module alone: the model's own names the kernel of all others, and of the masks.
        config.__dict__["_attn_implementation_internal"] = REGISTERED
        return [Swapped(module, "config", config)]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        causal: bool,
        dropout: float,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs (batch, head, query, size) and weights, as `gaussian_attention` gives them."""
        number: float | Tensor = query.shape[-1] ** -0.5 if scale is None else scale
        if self.log_width is not None:
            exact = torch.promote_types(query.dtype, torch.float32)
            number = number * (-self.log_width.to(exact)).exp()[:, None, None]
        found = gaussian_attention(
            query, key, value, mask,
            causal=causal, dropout=dropout, scale=number, normalize=self.normalize,
        )  # fmt: skip
        self.least_row_sum = least(found.row_sum, mask).detach()
        return found.output, found.weights

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register()


def least(row_sum: Float[Tensor, "batch head query"], mask: Tensor | None) -> Float[Tensor, ""]:
    """The least row sum of queries that are no padding: whose own key some query may see."""
    if mask is None or mask.dim() == 4 and mask.shape[-1] != row_sum.shape[-1]:
        return row_sum.min()
    keys = mask[:, None, None] if mask.dim() == 2 else mask
    allowed = keys > FORBIDDEN if keys.is_floating_point() else keys != 0
    if allowed.shape[-1] != row_sum.shape[-1]:
        return row_sum.min()
    return row_sum.masked_fill(~allowed.any(-2), float("inf")).min()


@dataclass(slots=True)
class Swapped:
    """One attribute of a module that was set to another value; `remove` sets it back."""

    module: nn.Module
    name: str
    after: Any
    before: Any = None

    def __post_init__(self) -> None:
        self.before = getattr(self.module, self.name)
        setattr(self.module, self.name, self.after)

    def remove(self) -> None:
        """Set the attribute back."""
        setattr(self.module, self.name, self.before)


class GaussianSelfAttention(SplitAttention):
    """`nn.MultiheadAttention` with projections as modules, and a Gaussian kernel in it."""

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        kernel = self._modules[REGISTERED]
        assert kernel is not None
        dropout = self.dropout if self.training else 0.0
        output, weights = kernel(q, k, v, mask, causal=False, dropout=dropout, scale=None)
        return output, weights if need_weights else None


def register() -> None:
    """Make the kernel known to transformers, where there is one."""
    try:
        from transformers import AttentionInterface
    except ImportError:
        return
    AttentionInterface.register(REGISTERED, registered_attention)


def registered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The attention function that Hugging Face modules look up by name: (batch, query, head, size)
    and the weights."""
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise AttoscopeError(
            f"attention_mask: got {type(attention_mask).__name__}; expected a tensor; load the "
            "model with attn_implementation='sdpa' or 'eager' before it is treated"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # A mask by query holds the causal triangle itself; one of keys alone does not.
    whole = attention_mask is not None and attention_mask.dim() == 4
    causal = bool(causal) and query.shape[2] > 1 and not whole
    mask = _with_bias(attention_mask, position_bias)
    output, weights = module._modules[REGISTERED](  # type: ignore[misc]
        query, key, value, mask, causal=causal, dropout=dropout, scale=scaling
    )
    return output.transpose(1, 2).contiguous(), weights


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return bias if mask is None else mask
    mask = mask[:, None, None] if mask.dim() == 2 else mask
    if mask.is_floating_point():
        return mask + bias
    return bias.masked_fill(mask == 0, float("-inf"))


class GaussianKind(Kind):
    name = NAME
    defaults: ClassVar[dict[str, Any]] = {"normalize": False, "learnable": False}

    def check(self, options: dict[str, Any]) -> None:
        for name in self.defaults:
            check_choice(name, options[name], (True, False))

    def find(self, subject: Subject, batch: Batch, data: Any, options: dict[str, Any]) -> Found:
        found = find_places(subject, batch)
        names = {place.attention for place in found.places}
        for call in _calls(subject, batch):
            if call.module in names:
                _check_call(subject.model, call)
        return found

    def warnings(
        self, subject: Subject, batch: Batch, options: dict[str, Any], inputs: str
    ) -> list[str]:
        notes = [
            "the weights were made for softmax; train the model before its outputs mean anything, "
            "and undo the treatment before it is diagnosed"
        ]
        if options["normalize"]:
            return [
                *notes,
                "rows are divided by their sums: this is softmax with a bias by the norm of the "
                "keys, and has its rank defect",
            ]
        sums = [rows for call in _calls(subject, batch) for rows in _row_sums(call)]
        every = torch.cat(sums)
        dead = float((every < DEAD).double().mean())
        return [
            *notes,
            f"on {inputs} the kernel's rows sum to {float(every.min()):.3g} at least and "
            f"{float(every.median()):.3g} in the middle; {dead:.0%} of them are dead (below "
            f"{DEAD:g})",
        ]

    def build(self, model: nn.Module, places: list[Place], options: dict[str, Any]) -> Built:
        pairs: list[tuple[Place, Remedy, str]] = []
        for place, _ in unique(places):
            _check_module(model, place.attention)
            kernel = GaussianKernel(place, weight_of(model, place), **options)
            pairs.append((place, kernel, "attends by a Gaussian kernel instead of softmax"))
        return installed(model, pairs)


def _calls(subject: Subject, batch: Batch) -> Iterator[AttentionCall]:
    """The self-attention calls of a run."""
    calls: list[AttentionCall] = []

    def visit(layer: Layer, _: Batch) -> None:
        calls.extend(call for call in layer.calls if not call.site.call.startswith("cross"))

    watch(subject, batch, visit)
    yield from calls


def _row_sums(call: AttentionCall) -> Iterator[Float[Tensor, " row"]]:
    """Row sums that the kernel would have in a call's place, of queries that see a key."""
    if call.query is not None and call.key is not None:
        weights = gaussian_weights(
            call.query, call.key, call.mask, causal=call.causal, scale=call.scale
        )
        yield weights.sum(-1).flatten().cpu()


def _check_call(model: nn.Module, call: AttentionCall) -> None:
    for name, extra in (("a soft cap", call.softcap), ("an attention sink", call.sinks)):
        if extra is not None:
            raise AttoscopeError(
                f"{NAME}: got {name} in {call.site} ({call.module}), which has a meaning in a "
                "softmax only; expected attention without it"
            )
    if call.route != "registry" and not isinstance(
        module_at(model, call.module), nn.MultiheadAttention
    ):
        raise AttoscopeError(_WHERE.format(where=f"{call.site} ({call.module})"))
    _check_module(model, call.module)


def _check_module(model: nn.Module, name: str) -> None:
    module = module_at(model, name)
    known = hasattr(getattr(module, "config", None), "_attn_implementation_internal")
    if not isinstance(module, SplitAttention) and not known:
        raise AttoscopeError(_WHERE.format(where=name))


_WHERE = (
    "gaussian: got attention in {where} whose kernel cannot be replaced from outside; expected a "
    "Hugging Face model that looks its attention function up by name, or nn.MultiheadAttention; in "
    "code of your own call attoscope.remedies.gaussian.gaussian_attention"
)
