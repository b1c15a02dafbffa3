"""From the graph of a run to residual branches: chains of additions, their norms and matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from attoscope.trace.curves import NormKind, curve_name, norm_kind
from attoscope.trace.dataflow import (
    ADDITIONS,
    NORMS,
    Addition,
    Call,
    Node,
    back,
    between,
)


@dataclass(frozen=True, slots=True)
class FoundNorm:
    """A norm on the way: its kind and the module's name (None for a bare function)."""

    kind: NormKind
    name: str | None


class Residual:
    """A sum `stream + branch` of which the branch was computed from the stream."""

    def __init__(
        self, addition: Addition, stream: Node, branch: Node, source: Node, read: Node
    ) -> None:
        self.addition = addition
        self.stream, self.branch = stream, branch
        self.source = source  # what the stream's operand is a cast, view or multiple of
        self.read = read  # what the branch reads: `source`, or an older stream (parallel)
        self.before: Residual | None = None
        self.joint: FoundNorm | None = None  # the norm between the sum before and this stream

    @cached_property
    def inside(self) -> dict[int, Node]:
        """Every node of the branch."""
        found = between(self.branch, self.read)
        found.pop(self.read.index, None)
        return found

    @cached_property
    def calls(self) -> list[Call]:
        """Attention calls made in the branch, in order."""
        return [call for index in sorted(self.inside) for call in self.inside[index].calls]

    @cached_property
    def products(self) -> list[Node]:
        """Products with weight matrices in the branch, in order."""
        return [self.inside[i] for i in sorted(self.inside) if self.inside[i].product]

    @property
    def skip(self) -> float | None:
        """The factor in front of the stream."""
        return _factor(self.stream, self.source)

    @property
    def hops(self) -> int:
        """How many casts, views and scalings lie between the source and the operand."""
        return list(back(self.stream)).index(self.source)

    @property
    def scale(self) -> float | None:
        """The factor in front of what the branch's last module or product gives."""
        return _factor(self.branch)


def _factor(node: Node, oldest: Node | None = None) -> float | None:
    """The product of the numbers that a node was scaled by since `oldest`, or since its maker."""
    factor = 1.0
    for each in back(node):
        made = each.product or each.ends or each.carried is None
        if each is oldest or (oldest is None and made):
            break
        if each.scale is None:
            return None
        factor *= each.scale
    return factor


class Norms:
    """Which modules and functions are norms, told by what they do; each is tried once."""

    def __init__(self) -> None:
        self._known: dict[nn.Module, NormKind | None] = {}

    def at(self, node: Node) -> tuple[FoundNorm, Node] | None:
        """The norm that made a node, and what it was made from."""
        for end in node.ends:
            if end.module not in self._known:
                self._known[end.module] = norm_kind(end.module, node.shape[-1])
            kind = self._known[end.module]
            if kind is not None:
                return FoundNorm(kind, end.name), end.source
        if node.func in NORMS and node.parents:
            return FoundNorm(
                "layer" if node.func == "layer_norm" else "rms", None
            ), node.parents[0]
        return None

    def back(self, node: Node) -> Iterator[tuple[Node, FoundNorm | None]]:
        """Back through casts, views, multiples and norms, with the norm met last on the way."""
        seen: FoundNorm | None = None
        current: Node | None = node
        while current is not None:
            yield current, seen
            step = self.at(current)
            if step is not None:
                seen, current = step
            else:
                current = current.carried

    def reach(self, node: Node, target: Node) -> tuple[bool, FoundNorm | None]:
        """Whether `target` is reached from `node` in this way, and the norm on it."""
        for each, norm in self.back(node):
            if each is target:
                return True, norm
            if each.index < target.index:
                break
        return False, None


def residuals(additions: list[Addition], norms: Norms) -> list[Residual]:
    """Every addition that is residual, linked to the one that its stream comes from."""
    found: dict[int, Residual] = {}
    for addition in additions:
        one = _residual(addition, found, norms)
        if one is None:
            continue
        for node, norm in norms.back(one.stream):
            if node.index in found:
                one.before, one.joint = found[node.index], norm
                break
        found[addition.node.index] = one
    return list(found.values())


def _residual(addition: Addition, found: dict[int, Residual], norms: Norms) -> Residual | None:
    for stream, branch in (
        (addition.left, addition.right),
        (addition.right, addition.left),
    ):
        if branch.constant or stream.constant:
            continue
        # The branch reads the stream; or, in parallel blocks, the stream of an addition before.
        for source, read in _streams(stream, found):
            one = Residual(addition, stream, branch, source, read)
            inside = read.index < branch.index and read.index in between(branch, read)
            if inside and _through_matrix(one):
                return one
    return None


def _streams(stream: Node, found: dict[int, Residual]) -> Iterator[tuple[Node, Node]]:
    carried = list(back(stream))
    yield from ((node, node) for node in carried)
    yield from ((node, found[node.index].source) for node in carried if node.index in found)


def _through_matrix(one: Residual) -> bool:
    """Whether something in the branch that depends on what it reads is a matrix product."""
    return any(one.read.index in between(node, one.read) for node in one.products)


def chains(found: list[Residual]) -> list[list[Residual]]:
    """Chains of residual additions in which every attention call belongs to one: longest first.

    Sums inside a branch (a skip of its own) make shorter chains around the same call, or chains
    without one; they are no sub-layers of the stream.
    """
    length: dict[int, int] = {}
    for one in found:
        length[id(one)] = 1 + (length[id(one.before)] if one.before else 0)
    claimed: set[int] = set()
    members: set[int] = set()
    made = []
    # Of two as long the later one: a sum that is changed once more before its norm.
    for last in sorted(found, key=lambda one: (-length[id(one)], -one.addition.node.index)):
        chain: list[Residual] = []
        step: Residual | None = last
        while step is not None and id(step) not in members:
            chain.insert(0, step)
            step = step.before
        calls = {id(call) for one in chain for call in one.calls}
        if calls and not calls & claimed:
            claimed |= calls
            members |= {id(one) for one in chain}
            made.append(chain)
    return made


def is_parallel(one: Residual, norms: Norms) -> bool:
    """Whether the branch is a sum of two, of which exactly one attends."""
    for node, _ in norms.back(one.branch):
        if node.func in ADDITIONS and len(node.parents) == 2:
            sides = [between(parent, one.read) for parent in node.parents]
            attends = [any(n.calls for n in side.values()) for side in sides]
            works = [any(n.product for n in side.values()) for side in sides]
            return all(works) and attends[0] != attends[1]
        if node.index <= one.read.index:
            break
    return False


def input_norm(one: Residual, norms: Norms) -> FoundNorm | None:
    """The norm between the stream and the first matrices of the branch."""
    for node in one.products:
        for parent in node.parents:
            reached, norm = norms.reach(parent, one.read)
            if reached:
                return norm
    return None


def output_norm(one: Residual, norms: Norms) -> FoundNorm | None:
    """The norm between the last matrix of the branch and the sum."""
    norm = None
    for node, met in norms.back(one.branch):
        norm = met
        if node.product:
            break
    return norm


def last_norm(one: Residual, block: str, nodes: list[Node], norms: Norms) -> FoundNorm | None:
    """The norm that reads the last sum of a chain inside its block."""
    for node in nodes:
        step = norms.at(node)
        if step is None or step[0].name is None or not step[0].name.startswith(f"{block}."):
            continue
        if norms.reach(step[1], one.addition.node) == (True, None):
            return step[0]
    return None


def maker(one: Residual, block: str) -> str:
    """The outermost module inside the block whose output is the branch."""
    for node in back(one.branch):
        names = [end.name for end in node.ends if end.name != block]
        inner = [n for n in names if not block or n.startswith(f"{block}.")]
        if inner:
            return inner[-1]
        if node.product:
            break
    return ""


def gate_of(one: Residual) -> tuple[bool, set[int]]:
    """Whether two products are multiplied with each other, and the products on the gate's side.

    The gate's side is the one that passes through an activation.
    """
    products = {node.index for node in one.products}
    for index in sorted(one.inside):
        node = one.inside[index]
        if node.func not in ("mul", "__mul__", "mul_", "__imul__") or len(node.parents) != 2:
            continue
        sides = [{i for i in between(p, one.read) if i in products} for p in node.parents]
        if not all(sides):
            continue
        plain = [any(step.product for step in back(p)) for p in node.parents]
        if sides[0] == sides[1] and not any(map(_is_part, node.parents)):
            continue  # an activation written out, such as x * sigmoid(x)
        gates = {i for side, bare in zip(sides, plain, strict=True) if not bare for i in side}
        return True, gates
    return False, set()


def _is_part(node: Node) -> bool:
    """Whether it is a part of a product's columns."""
    return any(step.func in ("chunk", "split", "__getitem__", "unbind") for step in back(node))


def activation_of(one: Residual) -> str | None:
    """The name of the function between the first matrix and the next, by its curve.

    Modules first: a function on its own may be a step of an activation that is written out.
    """
    products = {node.index for node in one.products}
    nodes = [one.inside[index] for index in sorted(one.inside)]
    for node in nodes:
        for end in reversed(node.ends):
            bare = not any(True for _ in end.module.parameters())
            if bare and _from_product(end.source, products):
                name = curve_name(end.module)
                if name is not None:
                    return name
    for node in nodes:
        if node.carried is None and node.repeat is not None and len(node.parents) == 1:
            if _from_product(node.parents[0], products):
                name = curve_name(node.repeat)
                if name is not None:
                    return name
    return None


def _from_product(node: Node, products: set[int]) -> bool:
    return any(step.index in products for step in back(node))
