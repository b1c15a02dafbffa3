"""The tokens that the losses need, caught in the forward pass that trains a model."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.trace.frames import stream, undisturbed
from attoscope.trace.layout import Layout, puts_time_first, survey


class BlockTokens:
    """After a forward pass: `first` and `last`, the stream after the first and the last block.

    Shape (batch, token, width), with gradients, before any norm that follows the last block. No
    name of a module is needed: in the first pass the blocks are found by one more pass over the
    same batch, in evaluation mode. The tokens are of the latest pass, whose graph they keep alive
    until the next one or `close`; leave the `with` block, or call `close`, to remove the hooks.

        with BlockTokens(model) as tokens:
            loss = cross_entropy(model(pixels).logits, labels) + cosine_loss(tokens.last)

    Args:
        model: the module that the loop calls.
        skip: tokens at the start that are no content and are left out: 1 for [CLS], 2 with a
            distillation token, 0 for models without any.
        stack: which stack, where the model has several ("encoder", "decoder").

    Raises:
        AttoscopeError: in the first pass, where no blocks are found, or several stacks; in any,
            where the blocks run without gradients although the pass has them (reentrant
            activation checkpointing); at `first` and `last`, before any pass.
    """

    def __init__(self, model: Any, *, skip: int = 1, stack: str | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise AttoscopeError(
                f"model: got a {type(model).__name__}; expected the torch module that is trained"
            )
        if not any(True for _ in model.children()):
            raise AttoscopeError(
                f"model: got a {type(model).__name__} without any module in it; expected a model "
                "that has attention blocks"
            )
        if isinstance(skip, bool) or not isinstance(skip, int) or skip < 0:
            raise AttoscopeError(f"skip: got {skip!r}; expected a number of tokens from 0 on")
        self.model, self.skip, self.stack = model, skip, stack
        self._time_first = False
        self._found = self._busy = self._gradients = False
        self._first: Tensor | None = None
        self._last: Tensor | None = None
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True)
        ]

    @property
    def first(self) -> Float[Tensor, "batch token width"]:
        """Content tokens after the first block, of the latest pass."""
        return self._content(self._first)

    @property
    def last(self) -> Float[Tensor, "batch token width"]:
        """Content tokens after the last block, of the latest pass."""
        return self._content(self._last)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy of the model, whose hooks are those of a copy of this: without the tokens."""
        return self.__dict__ | {"_first": None, "_last": None}

    def close(self) -> None:
        """Remove all hooks and forget the tokens."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._first = self._last = None

    def __enter__(self) -> BlockTokens:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._busy:
            return
        if not self._found:
            self._busy = True
            try:
                self._hook(_surveyed(module, args, kwargs))
            finally:
                self._busy = False
            self._found = True
        self._first = self._last = None
        self._gradients = torch.is_grad_enabled()

    def _hook(self, layout: Layout) -> None:
        names = [stack.name for stack in layout.stacks]
        stack = self.stack if self.stack is not None or len(names) > 1 else names[0]
        if stack not in names:
            given = "none was chosen" if stack is None else f"got {stack!r}"
            raise AttoscopeError(f"stack: {given}; expected one of {', '.join(names)}")
        self._time_first = layout.time_first
        members = [name for name, of in layout.members.items() if of == stack]
        for name, hook in ((members[0], self._take_first), (members[-1], self._take_last)):
            handle = self.model.get_submodule(name).register_forward_hook(hook)
            self._handles.append(handle)

    def _take_first(self, module: nn.Module, args: Any, output: Any) -> None:
        # A block that runs many times, as where layers share weights, counts when it first ran.
        if self._first is None and not self._recomputes():
            self._first = self._taken(output)

    def _take_last(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._recomputes():
            self._last = self._taken(output)

    def _recomputes(self) -> bool:
        """In a backward pass checkpointed blocks run once more: these are other tensors."""
        return bool(torch._C._current_graph_task_id() != -1)

    def _taken(self, output: Any) -> Tensor | None:
        if self._gradients and not torch.is_grad_enabled():
            raise AttoscopeError(
                "the blocks run without gradients (reentrant activation checkpointing), so no loss "
                "on their tokens can train them; turn it off or make it use_reentrant=False"
            )
        tokens = stream(output)
        if tokens is not None and self._time_first:
            tokens = tokens.transpose(0, 1)
        return tokens

    def _content(self, tokens: Tensor | None) -> Tensor:
        if tokens is None:
            raise AttoscopeError(
                "no tokens yet: run the model once, then read first and last before close"
            )
        if tokens.dim() == 2:
            tokens = tokens[None]
        return tokens[:, self.skip :]


def _surveyed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout:
    """The model's blocks, from one more pass that leaves nothing behind."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 0]
    if not tensors:
        raise AttoscopeError(
            "the model was called without a tensor: expected at least one with a batch axis"
        )
    time_first = tensors[0].dim() == 3 and puts_time_first(model)
    batch = tensors[0].shape[1 if time_first else 0]
    cached = torch.is_autocast_cache_enabled()
    # A cast of a weight that was made without gradients must not serve the pass that has them.
    torch.set_autocast_cache_enabled(False)
    try:
        with undisturbed(model), warnings.catch_warnings():
            # Of checkpoints that have no gradients: this pass needs none.
            warnings.simplefilter("ignore")
            return survey(model, lambda: model(*args, **kwargs), batch)
    finally:
        torch.set_autocast_cache_enabled(cached)
