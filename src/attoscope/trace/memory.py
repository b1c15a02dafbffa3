"""Count the bytes of tensors that are alive, exactly, instead of watching resident memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def parameter_count(module: nn.Module) -> int:
    """Number of parameters; tied ones, which share their storage, count once."""
    return sum(p.numel() for p in _apart(module))


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of parameters; tied ones count once."""
    return sum(p.nbytes for p in _apart(module))


def _apart(module: nn.Module) -> list[nn.Parameter]:
    # Parameters on the meta device have no storage to compare.
    return list({p.data_ptr() or id(p): p for p in module.parameters()}.values())


class PeakBytes(TorchDispatchMode):
    """The largest number of bytes of tensor storage made inside the block and alive at once.

    Storages that existed before (weights, inputs) do not count; views share their storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._alive: dict[int, int] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._meet(leaf, new=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._meet(leaf, new=True)
        return result

    def _meet(self, tensor: Tensor, new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes() if new else 0
        self._alive[key] = size
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.current -= self._alive.pop(key, 0)
        self._known.discard(key)
