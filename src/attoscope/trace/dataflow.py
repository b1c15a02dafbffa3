"""What was computed from what in one run: a graph of the tensor functions that were called.

Nodes hold no tensors, so the graph is small; tensors point to their nodes as long as they live.
What happens inside a fused kernel or a compiled function is one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from attoscope.trace.frames import Frame
from attoscope.trace.types import AttentionCall, Site

ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
# Functions that keep a stream what it is: casts, views, dropout, and scaling by a constant.
CARRIERS = {
    "__get__", "clone", "contiguous", "detach", "div", "__truediv__", "dropout", "dropout_",
    "feature_dropout", "flatten", "float", "half", "bfloat16", "double", "mul", "mul_", "__mul__",
    "__rmul__", "__imul__", "movedim", "permute", "reshape", "squeeze", "to", "transpose", "type",
    "type_as", "unflatten", "unsqueeze", "view", "view_as", "expand", "chunk", "split", "unbind",
    "__getitem__", "neg", "multiply", "divide", "masked_fill",
}  # fmt: skip
PRODUCTS = {
    "linear", "addmm", "addmm_", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm",
    "einsum", "conv1d", "grouped_mm", "_grouped_mm", "multi_head_attention_forward", "module",
}  # fmt: skip
NORMS = {"layer_norm": "layer", "rms_norm": "rms"}
_SCALINGS = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
_DIVISIONS = {"div", "__truediv__", "divide"}


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """A module whose output a node is: its name, and the node of what entered it."""

    name: str
    module: nn.Module
    source: Node


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An attention call: where it is, and the nodes of its operands as far as they are known."""

    site: Site
    module: str
    operands: dict[Literal["query", "key", "value"], Node]


@dataclass(slots=True, eq=False)
class Node:
    """One function's result. `parents` are the operands that depend on the model's input.

    `weights` names the parameters with two axes or more among the operands; `constant` says that
    nothing of it depends on the input; `index` counts up in the order of the run; `transposed`
    that the weight is stored as (inputs, outputs). `repeat` makes the function again of one
    tensor, where it has no other.
    """

    index: int
    func: str
    parents: tuple[Node, ...]
    weights: tuple[str, ...]
    constant: bool
    shape: tuple[int, ...]
    scale: float | None = 1.0
    transposed: bool = False
    ends: list[End] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    repeat: Callable[[Tensor], Any] | None = None

    @property
    def product(self) -> bool:
        """Whether it is a product with one of the model's weight matrices."""
        return self.func in PRODUCTS and bool(self.weights)

    @property
    def carried(self) -> Node | None:
        """The operand that it merely carries on (cast, reshaped, scaled by a constant)."""
        if self.func in CARRIERS and len(self.parents) == 1:
            return self.parents[0]
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Addition:
    """A sum of two tensors of one shape, where it was made, and the layer numbers at that time."""

    node: Node
    left: Node
    right: Node
    key: tuple[str, int, int]
    frames: tuple[str, ...]
    layers: dict[str, int]


class Flow(TorchFunctionMode):
    """Records the graph of a run of `model`; `frames` is the stack of running modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.layers: dict[str, int] = {}
        self.additions: list[Addition] = []
        self.calls: list[Call] = []
        self.ended: list[Node] = []
        self.counter = AdditionCounter()
        self._nodes: Any = WeakIdKeyDictionary()
        self._index = 0
        self._at: dict[int, Node] = {}
        self._during: list[Call] | None = None
        self._last: Node | None = None
        for name, parameter in model.named_parameters(remove_duplicate=True):
            wide = (name,) if parameter.dim() >= 2 else ()
            self._nodes[parameter] = self._node("parameter", (), wide, True, parameter)
        for buffer in model.buffers():
            self._nodes[buffer] = self._node("buffer", (), (), True, buffer)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        operands = [self.of(tensor) for tensor in given]
        key = self.counter.count(name, args, self.frames) if name in ADDITIONS else None
        during: list[Call] = []
        self._during = during
        result = func(*args, **kwargs)
        self._during = None
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if name == "__setitem__":
            made = given[:1]
        changed = name == "__setitem__" or (_in_place(name) and bool(given))
        for tensor in made:
            if tensor not in self._nodes or (changed and tensor is given[0]):
                node = self._made(name, func, args, kwargs, operands, tensor)
                self._nodes[tensor] = self._at[_address(tensor)] = self._last = node
                if key is not None and len(operands) == 2:
                    self._add(node, operands, key)
        if during and self._last is not None:
            self._last.calls += during
        return result

    def of(self, tensor: Tensor) -> Node:
        """The node of a tensor; one that nobody made here came in from outside."""
        node: Node | None = self._nodes.get(tensor)
        if node is None:
            node = self._nodes[tensor] = self._node("input", (), (), False, tensor)
        return node

    def on_call(self, call: AttentionCall) -> None:
        """Note an attention call at the node that it made."""
        note = Call(call.site, call.module, {})
        for part in ("query", "key", "value"):
            tensor = getattr(call, part)
            if tensor is not None:
                # A view that the trace itself made is known by the memory that it shows.
                node = self._nodes.get(tensor) or self._at.get(_address(tensor))
                if node is not None:
                    note.operands[part] = node
        self.calls.append(note)
        if self._during is not None:
            self._during.append(note)
        elif call.output is not None and call.output in self._nodes:
            self._nodes[call.output].calls.append(note)
        elif self._last is not None:
            self._last.calls.append(note)

    def on_enter(self, frame: Frame) -> None:
        """Note which node enters a module."""
        self.counter.enter(frame)
        if frame.stream_in is not None:
            self.counter.sources[id(frame)] = self.of(frame.stream_in)

    def on_exit(self, frame: Frame) -> None:
        """Note which node a module has made; of one that nobody saw, the module is the maker."""
        source = self.counter.sources.pop(id(frame), None)
        self.counter.leave(frame)
        out = frame.stream_out
        if out is None or source is None:
            return
        if out not in self._nodes:
            wide = tuple(w for p in frame.module.parameters() for w in self.of(p).weights)
            self._nodes[out] = self._node("module", (source,), wide, False, out)
        node = self.of(out)
        if node is not source:
            node.ends.append(End(frame.name, frame.module, source))
            self.ended.append(node)

    def _made(
        self, name: str, func: Any, args: Any, kwargs: Any, operands: list[Node], out: Tensor
    ) -> Node:
        live = tuple(node for node in operands if not node.constant)
        weights = tuple(w for node in operands if node.constant for w in node.weights)
        node = self._node(name, live, () if name == "embedding" else weights, not live, out)
        node.scale = _scale(name, args, operands)
        node.transposed = _stored_transposed(name, operands)
        if len(operands) == 1 and len(live) == 1 and args and isinstance(args[0], Tensor):
            rest = args[1:]
            node.repeat = lambda tensor: func(tensor, *rest, **kwargs)
        return node

    def _node(
        self,
        func: str,
        parents: tuple[Node, ...],
        weights: tuple[str, ...],
        constant: bool,
        tensor: Tensor,
    ) -> Node:
        self._index += 1
        return Node(self._index, func, parents, weights, constant, tuple(tensor.shape))

    def _add(self, node: Node, operands: list[Node], key: tuple[str, int, int]) -> None:
        left, right = operands
        names = tuple(frame.name for frame in self.frames)
        self.additions.append(Addition(node, left, right, key, names, dict(self.layers)))


class AdditionCounter:
    """Numbers additions of two tensors of one shape: the module, its run, and which in it."""

    def __init__(self) -> None:
        self.sources: dict[int, Node] = {}
        self._runs: Counter[str] = Counter()
        self._run: dict[int, int] = {}
        self._made: Counter[int] = Counter()

    def enter(self, frame: Frame) -> None:
        """A module begins to run."""
        self._run[id(frame)] = self._runs[frame.name]
        self._runs[frame.name] += 1

    def leave(self, frame: Frame) -> None:
        """It has ended; the number of its frame may be used again."""
        self._run.pop(id(frame), None)
        self._made.pop(id(frame), None)

    def count(
        self, name: str, args: tuple[Any, ...], frames: list[Frame]
    ) -> tuple[str, int, int] | None:
        """The key of an addition, or None for one that is no sum of two such tensors."""
        if len(args) < 2 or not all(isinstance(a, Tensor) for a in args[:2]):
            return None
        left, right = args[:2]
        alike = left.shape == right.shape and left.dim() >= 2
        if not alike or not (left.is_floating_point() and right.is_floating_point()):
            return None
        top = frames[-1] if frames else None
        which = self._made[id(top)]
        self._made[id(top)] += 1
        return (top.name, self._run.get(id(top), 0), which) if top else ("", 0, which)


def back(node: Node) -> Iterator[Node]:
    """A node and what it carries on, from the newest to the oldest."""
    current: Node | None = node
    while current is not None:
        yield current
        current = current.carried


def between(node: Node, oldest: Node) -> dict[int, Node]:
    """Everything that `node` was computed from after `oldest`, by index; `node` included.

    `oldest` is a member where `node` depends on it.
    """
    found: dict[int, Node] = {}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.index < oldest.index or current.index in found:
            continue
        found[current.index] = current
        if current is not oldest:
            waiting.extend(current.parents)
    return found


def _address(tensor: Tensor) -> int:
    """Where its numbers are; tensors without numbers of their own share an address of no use."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else -1


def _stored_transposed(name: str, operands: list[Node]) -> bool:
    turned = any(node.transposed for node in operands if node.constant and node.weights)
    if name in PRODUCTS:
        return turned == (name in ("linear", "multi_head_attention_forward", "module"))
    return turned != (name in ("__get__", "t", "transpose", "permute", "swapaxes"))


def _in_place(name: str) -> bool:
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or (name.startswith("__i") and name in _AUGMENTED)


_AUGMENTED = {"__iadd__", "__imul__", "__isub__", "__itruediv__", "__iand__", "__ior__"}


def _scale(name: str, args: tuple[Any, ...], operands: list[Node]) -> float | None:
    """The number that a carrier multiplies by; None where it is a tensor."""
    if name not in _SCALINGS | _DIVISIONS:
        return 1.0
    numbers = [a for a in args[:2] if isinstance(a, (int, float))]
    if len(operands) != 1 or len(numbers) != 1:
        return None
    return float(numbers[0]) if name in _SCALINGS else 1.0 / float(numbers[0])
