"""The residual branches of a model, found by data flow: which additions take the stream, who made
the other operand, and where the norms are. No list of model names.

A residual addition is `y = a + b` in which b was computed from a through at least one weight
matrix. The additions whose stream operand comes, through norms and element-wise scalings alone,
from the addition before make up a stack's chain; its members are the sub-layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.trace.branch_reader import SublayerReader
from attoscope.trace.branch_types import Found as Found
from attoscope.trace.branch_types import Kind as Kind
from attoscope.trace.branch_types import Matrix as Matrix
from attoscope.trace.branch_types import Norm as Norm
from attoscope.trace.branch_types import Passing as Passing
from attoscope.trace.branch_types import Role as Role
from attoscope.trace.branch_types import Sublayer as Sublayer
from attoscope.trace.branches import Norms, chains, residuals
from attoscope.trace.branches_passing import Adder, Visit, modes, with_gradients
from attoscope.trace.capture import capturing
from attoscope.trace.dataflow import Flow
from attoscope.trace.frames import Frame, VisitorError, framed, undisturbed
from attoscope.trace.layout import Layout
from attoscope.trace.subject import Subject, head_of
from attoscope.trace.types import AttentionCall, Batch, Site
from attoscope.trace.watch import _Stream


def sublayers(subject: Subject, batch: Batch) -> tuple[Sublayer, ...]:
    """Every residual branch of the model, stack by stack, in the order in which they ran.

    Raises `AttoscopeError` where an attention call is part of no branch that could be recognised.
    """
    found = find_sublayers(subject, batch)
    if found.notes:
        raise AttoscopeError(found.notes[0])
    return found.sublayers


def find_sublayers(subject: Subject, batch: Batch) -> Found:
    """The same with notes in place of an error; found on a small part of the batch, in one run."""
    layout, small = subject.layout(batch), head_of(batch)
    with undisturbed(subject.model):
        flow = _recorded(subject, small, layout)
        norms = Norms()
        made = chains(residuals(flow.additions, norms))
        sizes = {name: tuple(p.shape) for name, p in subject.model.named_parameters()}
        reader = SublayerReader(layout, norms, flow, sizes)
        found = [pair for chain in made for pair in reader.read(chain)]
    claimed = {id(call) for chain in made for one in chain for call in one.calls}
    notes = tuple(
        f"attention of {call.site} ({call.module}): no addition was found in which its output is "
        "added to the stream that it was computed from; its branch is not among the sub-layers"
        for call in flow.calls
        if id(call) not in claimed
    )
    order = {stack.name: i for i, stack in enumerate(layout.stacks)}
    found.sort(key=lambda pair: (order[pair[1].site.stack], pair[0]))
    return Found(_numbered([each for _, each in found]), notes)


def _recorded(subject: Subject, small: Batch, layout: Layout) -> Flow:
    """The graph of one run, its attention calls with their sites."""
    flow = Flow(subject.model)
    stream = _Stream(layout, small, lambda layer, batch: None)
    flow.layers = stream.index

    def on_call(call: AttentionCall) -> None:
        stream.on_call(call)
        flow.on_call(call)

    def on_enter(frame: Frame) -> None:
        stream.on_enter(frame)
        flow.on_enter(frame)

    with capturing(on_call, len(small)):
        with framed(subject.model, on_enter, flow.on_exit) as frames:
            stream.frames = flow.frames = frames
            with flow:
                subject.run(small)
    return flow


def _numbered(found: list[Sublayer]) -> tuple[Sublayer, ...]:
    """A layer's second branch of one kind gets a number, as its second call would."""
    taken: Counter[Site] = Counter()
    numbered = []
    for each in found:
        taken[each.site] += 1
        if taken[each.site] > 1:
            call = f"{each.site.call}{taken[each.site]}"
            numbered.append(replace(each, site=replace(each.site, call=call)))
        else:
            numbered.append(each)
    return tuple(numbered)


def watch_sublayers(
    subject: Subject,
    batch: Batch,
    visit: Visit,
    *,
    found: tuple[Sublayer, ...] | None = None,
    train: bool = False,
    gradient: Callable[[Any], Tensor] | None = None,
) -> Any:
    """Run once and call `visit` for each sub-layer; give the model's output.

    `found` is what `sublayers` gave (else it is called). With `train` dropout is on. With
    `gradient`, a function from the output to a scalar, all gradients of one backward pass are
    handed out after the run, in the order of the run; all activations are then in memory. The
    model comes back as it was: flags, modes, its own gradients, random state.

    Raises `AttoscopeError` when a sub-layer that was found did not run this time.
    """
    wanted = sublayers(subject, batch) if found is None else found
    layout = subject.layout(batch)
    adder = Adder(wanted, _Stream(layout, batch, lambda layer, batch: None), visit)
    adder.keep = gradient is not None
    with undisturbed(subject.model), modes(subject.model, train, gradient is not None):
        given = with_gradients(batch) if gradient is not None else batch
        with framed(subject.model, adder.enter, adder.counter.leave) as frames:
            adder.frames = frames
            try:
                with adder:
                    output = subject.run(given)
            except VisitorError as wrapped:
                raise wrapped.error from None
        missing = [s for s in wanted if s.addition not in adder.seen]
        if missing:
            raise AttoscopeError(
                f"{len(missing)} of {len(wanted)} sub-layers did not run this time (first: "
                f"{missing[0].site}); the model's path depends on its input or its mode; use one "
                "batch at a time"
            )
        if gradient is not None:
            try:
                adder.hand_out(gradient(output))
            except VisitorError as wrapped:
                raise wrapped.error from None
    return output
