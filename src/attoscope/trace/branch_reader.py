"""What the graph of a run says about a residual branch: its kind, norms, matrices, activation."""

from __future__ import annotations

from dataclasses import replace

from attoscope.trace.branch_types import Kind, Matrix, Norm, Role, Sublayer
from attoscope.trace.branches import (
    FoundNorm,
    Norms,
    Residual,
    activation_of,
    gate_of,
    input_norm,
    is_parallel,
    last_norm,
    maker,
    output_norm,
)
from attoscope.trace.dataflow import Flow, Node, between
from attoscope.trace.layout import Layout
from attoscope.trace.types import Site


class SublayerReader:
    """Puts what the graph says about a branch into words."""

    def __init__(
        self, layout: Layout, norms: Norms, flow: Flow, sizes: dict[str, tuple[int, ...]]
    ) -> None:
        self.layout, self.norms, self.flow, self.sizes = layout, norms, flow, sizes

    def read(self, chain: list[Residual]) -> list[tuple[int, Sublayer]]:
        """The sub-layers of a chain, each with its place in the order of the run."""
        stack = next(call.site.stack for one in chain for call in one.calls)
        joints: list[FoundNorm | None] = [one.joint for one in chain[1:]]
        block = self._block(chain[-1], stack)
        joints.append(last_norm(chain[-1], block, self.flow.ended, self.norms))
        return [
            (one.addition.node.index, self._sublayer(one, stack, joint))
            for one, joint in zip(chain, joints, strict=True)
        ]

    def _block(self, one: Residual, stack: str) -> str:
        names = [n for n in one.addition.frames if self.layout.members.get(n) == stack]
        return names[-1] if names else ""

    def _sublayer(self, one: Residual, stack: str, joint: FoundNorm | None) -> Sublayer:
        kind = self._kind(one)
        before, behind = input_norm(one, self.norms), output_norm(one, self.norms)
        first = before or behind or joint
        block = self._block(one, stack)
        gated, gates = gate_of(one) if kind in ("mlp", "parallel") else (False, set())
        return Sublayer(
            site=Site(stack, one.addition.layers[stack], kind),
            kind=kind,
            block=block,
            module=maker(one, block),
            attention=one.calls[0].module if one.calls else "",
            norm=_placement(before, behind, joint),
            norm_kind=first.kind if first else None,
            input_norm=before.name if before else None,
            branch_norm=behind.name if behind else None,
            sum_norm=joint.name if joint else None,
            matrices=self._matrices(one, kind, gates),
            gated=gated,
            activation=activation_of(one) if kind in ("mlp", "parallel") else None,
            skip=one.skip,
            scale=one.scale,
            addition=one.addition.key,
            hops=one.hops,
            stream_first=one.stream is one.addition.left,
        )

    def _kind(self, one: Residual) -> Kind:
        if not one.calls:
            return "mlp"
        if all(call.site.call.startswith("cross") for call in one.calls):
            return "cross"
        return "parallel" if is_parallel(one, self.norms) else "attention"

    def _matrices(self, one: Residual, kind: Kind, gates: set[int]) -> tuple[Matrix, ...]:
        made: dict[str, Matrix] = {}
        for node in one.products:
            for name in node.weights:
                if name in made or len(self.sizes[name]) < 2:
                    continue
                roles = _roles(node, one, kind, gates, name)
                made[name] = _matrix(name, self.sizes[name], node, roles)
        return _in_series(tuple(made.values()))


def _placement(
    before: FoundNorm | None, behind: FoundNorm | None, joint: FoundNorm | None
) -> Norm:
    if joint is not None:
        return "post"
    if before is not None:
        return "pre" if behind is None else "sandwich"
    return "none" if behind is None else "branch"


def _matrix(name: str, size: tuple[int, ...], node: Node, roles: tuple[Role, ...]) -> Matrix:
    first, second = size[-2:]
    width = node.parents[0].shape[-1] if node.parents else first
    turned = node.transposed if first == second else width == first
    inputs, outputs = (first, second) if turned else (second, first)
    return Matrix(name, inputs, outputs, turned, roles)


def _roles(
    node: Node, one: Residual, kind: Kind, gates: set[int], name: str
) -> tuple[Role, ...]:
    """What a matrix makes: told by whether the call's queries, keys, values come from it."""
    if node.func == "multi_head_attention_forward":
        return (
            ("query", "key", "value") if name.endswith("in_proj_weight") else _torch_role(name)
        )
    made: list[Role] = []
    for call in one.calls:
        for part, operand in call.operands.items():
            if node.index in between(operand, node) and part not in made:
                made.append(part)
    if made:
        return tuple(made)
    callers = [n for n in one.inside.values() if n.calls]
    if any(caller.index in between(node, caller) for caller in callers):
        return ("output",)
    if kind == "parallel" or not one.calls:
        if node.index == _last_plain(one):
            return ("out",)
        fused = node.index in gates and gates == _free(one) - {_last_plain(one)}
        return ("gate", "in") if fused else ("gate",) if node.index in gates else ("in",)
    return ()


def _in_series(matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Without a role for what does not feed the last matrix, as a router."""
    last = next((m for m in matrices if m.roles == ("out",)), None)
    return tuple(
        replace(m, roles=())
        if last and m.roles[:1] in (("in",), ("gate",)) and m.outputs % last.inputs
        else m
        for m in matrices
    )


def _torch_role(name: str) -> tuple[Role, ...]:
    parts: dict[str, Role] = {"q": "query", "k": "key", "v": "value"}
    stem = name.rpartition(".")[2]
    return (parts[stem[0]],) if stem[1:] == "_proj_weight" else ("output",)


def _last_plain(one: Residual) -> int:
    return max(_free(one), default=0)


def _free(one: Residual) -> set[int]:
    """The products of a branch that no attention call goes into or has gone into."""
    callers = [node for node in one.inside.values() if node.calls]
    return {
        node.index
        for node in one.products
        if not any(
            caller.index in between(node, caller) or node.index in between(caller, node)
            for caller in callers
        )
    }
