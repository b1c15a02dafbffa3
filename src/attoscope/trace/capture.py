"""Catching attention calls while a model runs, whatever made them. Three routes:

1. registry: Hugging Face models look their attention function up by name; the look-up is
   wrapped, so that the function's arguments and its module are seen.
2. sdpa: code that calls `F.scaled_dot_product_attention`, also inside
   `F.multi_head_attention_forward`.
3. softmax: a softmax over (query, key) scores that came out of a batched product and whose
   result enters another one.

Nothing is replaced and nothing is added to what the model computes, so outputs stay equal bit
for bit. A call caught by route 1 or 2 is recomputed at a few rows and compared with what the
kernel returned: a kernel with a term that is not known here is then caught, not misreported.
"""

from __future__ import annotations

import math
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attoscope.errors import AttoscopeError
from attoscope.trace.einsum import output_of, scores_of
from attoscope.trace.rows import attention_rows
from attoscope.trace.types import AttentionCall

OnCall = Callable[[AttentionCall], None]

# Relative to the size of the output; half precision rounds scores before the softmax.
TOLERANCE = {
    torch.float64: 1e-5,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}

_SOFTMAX = {F.softmax, torch.softmax, torch.Tensor.softmax}
_PRODUCTS = {
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm,
    torch.baddbmm, torch.Tensor.baddbmm,
}  # fmt: skip
_BIASED = {torch.baddbmm, torch.Tensor.baddbmm}
_EINSUM = {torch.einsum, torch.functional.einsum}


class Capture(TorchFunctionMode):
    """Sees every attention call of the current thread and hands it to `on_call`.

    `batch` is the number of sequences, needed where a kernel folds heads into the batch axis.
    """

    def __init__(self, on_call: OnCall, batch: int) -> None:
        super().__init__()
        self.on_call = on_call
        self.batch = batch
        self.softmaxes = 0
        self.where: Callable[[], str] = lambda: ""
        self.unfinished: list[str] = []
        self._asleep = False
        self._registry: _RegistryCall | None = None
        self._products: deque[tuple[torch.Size, Tensor, Tensor]] = deque(maxlen=6)
        self._pending: AttentionCall | None = None
        self._projecting: AttentionCall | None = None

    def __torch_function__(
        self,
        func: Any,
        types_: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._asleep:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # Its body must run with this mode on, or the calls inside are not seen; with the
            # mode on its first line would dispatch here again, hence the copy.
            with self:
                return _MHA_BODY(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._on_sdpa(result, *args, **kwargs)
        elif func in _SOFTMAX:
            self._on_softmax(args, kwargs, result)
        elif func in _PRODUCTS:
            self._on_product(func, args, kwargs, result)
        elif func in _EINSUM:
            self._on_einsum(args, result)
        elif self._projecting is not None:
            if func is F.linear:
                weight = args[1] if len(args) > 1 else kwargs.get("weight")
                self._on_projection(args[0] if args else kwargs.get("input"), weight, True)
            elif func in (torch.addmm, torch.Tensor.addmm) and len(args) >= 3:
                self._on_projection(args[1], args[2], False)
        return result

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Do not look at what is computed in this block: it is ours, not the model's."""
        before, self._asleep = self._asleep, True
        try:
            # Where torch offers it, the mode is passed over altogether: it costs time even idle.
            with getattr(torch._C, "DisableTorchFunction", nullcontext)():
                yield
        finally:
            self._asleep = before

    # Route 1 -------------------------------------------------------------------------------

    def registry_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of the attention registry, watched."""

        def watched(
            module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
        ) -> Any:
            outer, self._registry = self._registry, _RegistryCall()
            self._products.clear()
            try:
                result = function(module, query, key, value, *args, **kw)
                inner = self._registry
            finally:
                self._registry = outer
                self._pending = None
            mask = args[0] if args else kw.get("attention_mask")
            output = result[0] if isinstance(result, tuple) else result
            self._emit(
                _from_registry(module, query, key, value, mask, kw, inner, output), inner
            )
            return result

        return watched

    # Route 2 -------------------------------------------------------------------------------

    def _on_sdpa(
        self,
        result: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        if self._registry is not None:
            self._registry.kernel = (attn_mask, is_causal, scale)
            return
        query, key, value = (_with_heads(x, self.batch) for x in (query, key, value))
        call = AttentionCall(
            query, key, value, scale, "sdpa",
            mask=_mask_4d(attn_mask, query.shape[0]), causal=is_causal,
            output=_with_heads(result, self.batch).transpose(1, 2),
        )  # fmt: skip
        self._emit(call, None)

    # Route 3 -------------------------------------------------------------------------------

    def _on_product(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if func in _BIASED:
            operands = operands[1:]
        if len(operands) < 2:
            return
        left, right = operands[:2]
        if self._projecting is not None and right.dim() == 2:
            self._on_projection(left, right, False)
        if left.dim() < 3 or right.dim() < 3:
            return
        if not self._weighs(left, right, result):
            self._products.append((result.shape, left, right))

    def _on_einsum(self, args: tuple[Any, ...], result: Tensor) -> None:
        weighing = output_of(args, result)
        if weighing is not None and self._weighs(*weighing):
            return
        scoring = scores_of(args)
        if scoring is not None:
            self._products.append((result.shape, *scoring))

    def _weighs(self, weights: Tensor, value: Tensor, result: Tensor) -> bool:
        """Whether a product takes in the last softmax: then it was attention."""
        pending = self._pending
        if pending is None or pending.probabilities is None:
            return False
        if not _same_rows(weights.shape, pending.probabilities.shape):
            return False
        self._confirm(pending, value, result)
        return True

    def _on_softmax(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        scores = args[0] if args else kwargs.get("input")
        if not isinstance(scores, Tensor) or scores.dim() < 3:
            return
        self.softmaxes += 1
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        if axis not in (-1, scores.dim() - 1) or not scores.is_floating_point():
            return
        query = key = None
        for shape, left, right in reversed(self._products):
            if _same_rows(shape, scores.shape):
                query = _with_heads(left, self.batch)
                key = _with_heads(right, self.batch).transpose(-1, -2)
                break
        else:
            if scores.dim() == 3:  # a router or a language head, not attention
                return
        self._leave_pending()
        self._pending = AttentionCall(
            query, key, None, 1.0, "softmax",
            probabilities=_with_heads(result.detach(), self.batch),
            raw_scores=_with_heads(scores.detach(), self.batch),
            module=self.where(),
        )  # fmt: skip

    def _leave_pending(self) -> None:
        """A softmax over scores whose weights were not seen to weigh anything."""
        if self._pending is not None and self._pending.query is not None:
            self.unfinished.append(self._pending.module)
        self._pending = None

    def _confirm(self, call: AttentionCall, value: Tensor, result: Tensor) -> None:
        self._pending = None
        self._products.clear()
        call.value = _with_heads(value, self.batch)
        call.output = _with_heads(result, self.batch).transpose(1, 2)
        if self._registry is not None:
            self._registry.explicit = call
        else:
            self._emit(call, None)

    # All routes ----------------------------------------------------------------------------

    def _on_projection(self, source: Any, weight: Any, transposed: bool) -> None:
        """The first projection of the heads' outputs after a call: the output matrix by head."""
        call = self._projecting
        if call is None or call.output is None or not isinstance(weight, Tensor):
            return
        heads, size = call.output.shape[2:]
        if not isinstance(source, Tensor) or source.numel() != call.output.numel():
            return
        matrix = weight.T if transposed else weight
        self._projecting = None
        if matrix.shape[0] == heads * size:
            call.output_weight = matrix.detach().reshape(heads, size, -1)

    def _emit(self, call: AttentionCall, inner: _RegistryCall | None) -> None:
        self._pending = None
        with self.asleep():
            self._deliver(call, inner)

    def _deliver(self, call: AttentionCall, inner: _RegistryCall | None) -> None:
        if not _reproduces(call):
            if inner is None or inner.explicit is None:
                raise AttoscopeError(self._unknown_term(call))
            inner.explicit.module = call.module
            call = inner.explicit
        self._projecting = call
        self.on_call(call)

    def _unknown_term(self, call: AttentionCall) -> str:
        advice = (
            "load the model with attn_implementation='eager', where the softmax can be watched"
            if call.route == "registry"
            else "something changes the weights between the softmax and the values, as in talking "
            "heads or a mask put on late; such attention cannot be read"
        )
        return (
            f"attention call in {self.where() or call.module or 'the model'}: its output cannot be "
            "reproduced from its queries, keys, values and mask, so it has a term that attoscope "
            f"does not know; {advice}"
        )


class _RegistryCall:
    """What was seen inside one call through the registry."""

    def __init__(self) -> None:
        self.kernel: tuple[Tensor | None, bool, float] | None = None
        self.explicit: AttentionCall | None = None


@contextmanager
def capturing(on_call: OnCall, batch: int) -> Iterator[Capture]:
    """Watch all attention of this thread for the duration of the block."""
    capture = Capture(on_call, batch)
    with _watched_registry(capture), capture:
        yield capture
        capture._leave_pending()


@contextmanager
def _watched_registry(capture: Capture) -> Iterator[None]:
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    if interface is None or not hasattr(interface, "get_interface"):
        yield
        return
    plain = interface.get_interface
    owner = threading.get_ident()

    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = plain(self, *args, **kwargs)
        return capture.registry_call(function) if threading.get_ident() == owner else function

    inherited = "get_interface" not in vars(interface)
    interface.get_interface = get_interface
    try:
        yield
    finally:
        if inherited:
            del interface.get_interface
        else:
            interface.get_interface = plain


def _from_registry(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any,
    kwargs: dict[str, Any], inner: _RegistryCall, output: Tensor,
) -> AttentionCall:  # fmt: skip
    """The call from the registry function's arguments; mask and scale as the kernel saw them."""
    causal = False
    scale = kwargs.get("scaling")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if inner.kernel is not None:
        mask, causal, scale = inner.kernel
    else:
        if mask is not None and not isinstance(mask, Tensor):
            raise AttoscopeError(
                f"attention mask of type {type(mask).__name__} in {type(module).__name__}: "
                "expected a tensor; load the model with attn_implementation='sdpa' or 'eager'"
            )
        if mask is not None and mask.dim() == 2:  # flash kernels get the padding mask alone
            mask = mask.bool()[:, None, None, :]
            causal = bool(kwargs.get("is_causal", getattr(module, "is_causal", False)))
        mask = _add_bias(mask, kwargs.get("position_bias"))
    return AttentionCall(
        query, key, value, scale, "registry",
        mask=_mask_4d(mask, query.shape[0]), causal=causal,
        softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"),
        output=output if output.dim() == 4 else None,
        module=type(module).__name__,
    )  # fmt: skip


def _add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None:
        return mask
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, float("-inf"))
    return mask + bias


def _mask_4d(mask: Tensor | None, batch: int) -> Tensor | None:
    """A mask as (batch|1, head|1, query|1, key)."""
    if mask is None or mask.dim() == 4:
        return mask
    if mask.dim() == 2:
        return mask[None, None]
    if mask.dim() == 3 and mask.shape[0] in (1, batch):
        return mask[:, None]
    return mask.reshape(batch, -1, *mask.shape[-2:])


def _with_heads(tensor: Tensor, batch: int) -> Tensor:
    """(batch, head, row, column) from four axes, from heads folded into the batch, or grouped."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() == 5:
        return tensor.flatten(1, 2)
    if tensor.dim() == 2:
        return tensor[None, None]
    folded = tensor.shape[0]
    if folded % batch:
        return tensor[None]  # one unbatched sequence: (head, row, column)
    return tensor.reshape(batch, folded // batch, *tensor.shape[1:])


def _same_rows(left: torch.Size, right: torch.Size) -> bool:
    return left[-2:] == right[-2:] and left.numel() == right.numel()


@torch.no_grad()
def _reproduces(call: AttentionCall) -> bool:
    """Whether two recomputed rows of the call give what the kernel returned for them."""
    if call.output is None or call.value is None or call.query is None:
        return True
    batch, heads, queries, _ = call.shape
    if min(batch, queries) == 0 or call.output.shape[:3] != (batch, queries, heads):
        return call.output.numel() == 0 or call.output.shape[:3] == (batch, queries, heads)
    rows = torch.tensor([queries // 2, queries - 1], device=call.query.device).expand(batch, 2)
    rows = rows[:1] if batch > 1 else rows
    one = _first_sequence(call)
    found = attention_rows(one, rows)
    value = call.value[:1].float().repeat_interleave(heads // call.value.shape[1], 1)
    expected = (found.weights @ value).transpose(1, 2)
    actual = call.output[:1, rows[0]].float()
    readable = found.allowed.any(-1).all(1)[..., None, None] & expected.isfinite()
    size = expected.where(readable, 0.0).abs().max().clamp(min=1e-6)
    difference = (expected - actual).where(readable, 0.0).abs().max() / size
    tolerance = TOLERANCE.get(call.output.dtype, 1e-1)
    return bool(difference <= tolerance) or not bool(actual.isfinite().all())


def _first_sequence(call: AttentionCall) -> AttentionCall:
    assert call.query is not None and call.key is not None
    mask = call.mask if call.mask is None or call.mask.shape[0] == 1 else call.mask[:1]
    probabilities, scores = call.probabilities, call.raw_scores
    return AttentionCall(
        call.query[:1], call.key[:1], None, call.scale, call.route,
        mask=mask, causal=call.causal, softcap=call.softcap, sinks=call.sinks,
        probabilities=None if probabilities is None else probabilities[:1],
        raw_scores=None if scores is None else scores[:1],
    )  # fmt: skip


_MHA_BODY = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda *_: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
    F.multi_head_attention_forward.__closure__,
)
_MHA_BODY.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__
