"""Will gradient descent train this attention? Value path and kernel of every layer, on one batch.

The readings are derived here for a single layer with squared loss and full-batch gradient descent,
without residual stream or normalisation; arXiv 2411.07538 claims convergence in that setting. On a
deep model they describe each layer's own problem: they are conditions, not a promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.prediction.reach import ValuePath
from attoscope.prediction.reach import row_jacobian as row_jacobian
from attoscope.prediction.reach import softmax_floor as softmax_floor
from attoscope.prediction.reach import value_path as value_path
from attoscope.remedies.finding import find_places
from attoscope.remedies.gaussian import DEAD, GaussianKernel, gaussian_weights
from attoscope.remedies.places import Place, module_at
from attoscope.remedies.splitting import split_attention
from attoscope.trace import Batch, Layer, Subject, attention_rows, batches, subject_of, watch
from attoscope.trace.frames import undisturbed

ROWS = 256
# Value rows count as equal where they differ by less than this share of their size.
EQUAL = 1e-5
# A loss a thousand times smaller, within this many steps: slower is called useless.
THOUSAND, STEPS = math.log(1000), 1e6


@dataclass(frozen=True, slots=True)
class LayerTrainability:
    """One layer's value path and kernel.

    `path`: see `ValuePath`; its rows are the tokens used. `missed`: the share of the directions of
    a head's values that no softmax over all tokens reaches, `1 - rank(V - mean) / size`, mean over
    heads and documents (0: no floor for generic targets; earlier queries of causal attention see
    fewer tokens and miss more). `dead`: share of the rows that let through neither weight nor
    gradient (softmax: all but 1e-6 on one key, of rows that see two keys; Gaussian: a sum below
    1e-6). `trapped`: share of heads and documents whose value rows are all equal, where softmax
    gives the same whatever queries and keys are. `gaussian_least` and `gaussian_dead`: least row
    sum and dead share of a Gaussian kernel on the same queries and keys; None where they are not
    seen. `repeated`: rows that are equal to an earlier one in all heads.
    """

    name: str
    kernel: str
    path: ValuePath
    parameters: int
    outputs: int
    missed: float
    dead: float
    trapped: float
    repeated: int
    gaussian_least: float | None
    gaussian_dead: float | None

    @property
    def steps(self) -> float:
        """Steps after which the loss is surely a thousand times smaller, `ln 1000 / (mu / L)`, with
        free products of value and output matrix (`ValuePath.free_rate`)."""
        rate = self.path.free_rate
        return THOUSAND / rate if rate > 0 else math.inf

    def __str__(self) -> str:
        path = self.path
        sign, verdict = (">=", "yes") if path.wide_enough else ("<", "no")
        bound = "" if path.exact else "at least "
        rate = (
            f"mu/L {path.free_rate:.1e}, {self.steps:.1e} steps for a loss 1,000 times smaller "
            f"(value weights alone: {bound}{path.rate:.1e})"
        )
        words = [
            f"{self.name} ({self.kernel}): rank {path.rank} of {path.rows}, HD = {path.features} "
            f"{sign} Nn = {path.rows}: {verdict}; sigma_min {path.sigma_min:.1e}; {rate}",
            f"softmax misses {self.missed:.0%} of a head's directions; dead rows {self.dead:.1%}, "
            f"trapped {self.trapped:.1%}",
        ]
        if self.gaussian_least is not None:
            words.append(
                f"a Gaussian kernel would have row sums from {self.gaussian_least:.1e} and "
                f"{self.gaussian_dead:.1%} dead rows"
                if self.kernel == "softmax"
                else f"row sums from {self.gaussian_least:.1e}"
            )
        return "; ".join(words)


@dataclass(frozen=True, slots=True)
class Trainability:
    """What the layers' value paths and kernels allow; `str` says it in words.

    `layers` in the order in which they run, `tokens` used of `available` valid ones, `notes`.
    """

    layers: tuple[LayerTrainability, ...]
    tokens: int
    available: int
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        head = (
            f"value path and kernel of {len(self.layers)} layers on {self.tokens:,} of "
            f"{self.available:,} tokens (derived for one layer, squared loss and plain gradient "
            "descent; a condition, not a promise)"
        )
        lines = [f"  {layer}" for layer in self.layers]
        return "\n".join([head, *lines, *(f"  note: {note}" for note in self.notes)])


def attention_trainability(model: Any, batch: Any, *, rows: int = ROWS) -> Trainability:
    """Per attention layer: whether and how fast its value weights can fit anything, and its kernel.

    B has a row for every token used: `(S_h X)[k]` of all heads, side by side. `HD >= Nn` is needed
    for full row rank; then the loss falls by `1 - mu/L` per step. Always read `mu / L`: with
    `HD >= Nn` true it may be 1e-8, and then says nothing. It is given for free products of value
    and output matrix, `(sigma_min / sigma_max)^2` of B, and for the value weights alone, which is 0
    where they are fewer than the numbers to fit (rows x output width).

    Args:
        model: as for `attoscope.diagnose`: a directory, a module, a `Subject`; softmax attention
            found by running it, or layers treated with "gaussian" (those alone, then).
        batch: a `Batch` or what `attoscope.diagnose` takes; the first batch of 8 is used.
        rows: of so many valid tokens, the first ones. With more, sigma_min is smaller.

    The model comes back as it was. Cost: two forward passes, and a singular value decomposition of
    (rows, heads x width) per layer: about a second for 256 rows and 5,000 columns.

    Raises `AttoscopeError` for attention without plain value and output projections.
    """
    if not isinstance(rows, int) or rows < 1:
        raise AttoscopeError(f"rows: got {rows!r}; expected a number of tokens from 1 on")
    subject = subject_of(model)
    read = batch if isinstance(batch, Batch) else next(batches(subject, batch, batch_size=8))
    kernels = {n: m for n, m in subject.model.named_modules() if isinstance(m, GaussianKernel)}
    gathered = _gaussian(subject, read, kernels) if kernels else _taken_apart(subject, read)
    layers: list[LayerTrainability] = []
    tokens = available = 0
    for reading in gathered:
        layers.append(_measured(reading, rows))
        tokens, available = layers[-1].path.rows, int(reading.valid.sum())
    return Trainability(tuple(layers), tokens, available, _notes(layers))


@dataclass(slots=True)
class _Reading:
    """One attention call: weights, what the value projection reads, and values by head."""

    name: str
    kernel: str
    weights: Float[Tensor, "batch head query key"]
    seen: Bool[Tensor, "batches heads query key"]
    read: Float[Tensor, "batch key width"]
    values: Float[Tensor, "batch head key size"]
    groups: int
    output: Float[Tensor, "head size out"]
    valid: Bool[Tensor, "batch query"]
    gaussian: Float[Tensor, "batch head query"] | None


def _taken_apart(subject: Subject, batch: Batch) -> list[_Reading]:
    """With projections that are modules for as long as it takes."""
    split = split_attention(subject, batch)
    try:
        if split.names:
            subject._layout = None  # the replaced modules have other names in them
        return _softmax(subject, batch)
    finally:
        if split.names:
            split.undo()
            subject._layout = None


def _softmax(subject: Subject, batch: Batch) -> list[_Reading]:
    places = find_places(subject, batch).places
    waiting = list(places)
    found: list[_Reading] = []

    def visit(layer: Layer, _: Batch) -> None:
        for call in layer.calls:
            if call.site.call.startswith("cross"):
                continue
            place = waiting.pop(0)
            count, queries = call.shape[0], call.shape[2]
            at = torch.arange(queries, device=layer.valid.device).expand(count, -1)
            exact = attention_rows(call, at)
            sums = None
            if call.query is not None and call.key is not None:
                weights = gaussian_weights(
                    call.query, call.key, call.mask, causal=call.causal, scale=call.scale
                )
                sums = weights.sum(-1)
            assert call.value is not None
            found.append(
                _Reading(
                    str(call.site),
                    "softmax",
                    exact.weights,
                    exact.allowed,
                    _by_sequence(reads[place.value], place),
                    call.value[:, call.key_head()],
                    place.heads.count,
                    _output(subject.model, place),
                    layer.valid,
                    sums,
                )  # fmt: skip
            )

    with _reads(subject.model, places) as reads:
        watch(subject, batch, visit)
    return found


def _gaussian(
    subject: Subject, batch: Batch, kernels: dict[str, GaussianKernel]
) -> list[_Reading]:
    found: list[_Reading] = []

    def note(module: GaussianKernel, args: Any, kwargs: Any, result: Any) -> None:
        place, (_, weights) = module.place, result
        value = args[2].repeat_interleave(weights.shape[1] // args[2].shape[1], 1)
        valid = batch.valid
        if valid is None or valid.shape != weights.shape[:3:2]:
            valid = torch.ones(weights.shape[:3:2], dtype=torch.bool)
        read = _by_sequence(reads[place.value], place)
        found.append(
            _Reading(
                f"{place.stack}.{place.layer}",
                "Gaussian",
                weights,
                weights > 0,
                read,
                value,
                place.heads.count,
                _output(subject.model, place),
                valid,
                weights.sum(-1),
            )  # fmt: skip
        )

    places = [kernel.place for kernel in kernels.values()]
    hooks = [m.register_forward_hook(note, with_kwargs=True) for m in kernels.values()]
    try:
        with undisturbed(subject.model), _reads(subject.model, places) as reads:
            subject.run(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _reads(model: nn.Module, places: list[Place]) -> Iterator[dict[str, Tensor]]:
    """What each value projection read last."""
    last: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda module, args: last.__setitem__(name, args[0].detach())

    hooks = [
        module_at(model, name).register_forward_pre_hook(note(name))
        for name in {place.value for place in places}
    ]
    try:
        yield last
    finally:
        for hook in hooks:
            hook.remove()


def _by_sequence(read: Tensor, place: Place) -> Tensor:
    return read.transpose(0, 1) if place.time_first else read


def _output(model: nn.Module, place: Place) -> Float[Tensor, "head size out"]:
    """The output projection's weight by head, rows first."""
    module = module_at(model, place.output)
    weight = cast(Tensor, module.weight).detach()
    weight = weight.T if isinstance(module, nn.Linear) else weight
    return weight.reshape(place.heads.count * place.heads.repeat, place.heads.size, -1)


@torch.no_grad()
def _measured(reading: _Reading, rows: int) -> LayerTrainability:
    seen = _predictors(reading, rows)
    precision = _precision(reading.read)
    path = value_path(seen, reading.output.cpu(), groups=reading.groups, precision=precision)
    missed, trapped = _reachable(reading)
    least = dead = None
    if reading.gaussian is not None:
        sums = _rows(reading, reading.gaussian)
        least, dead = float(sums.min()), float((sums < DEAD).double().mean())
    joined = seen.transpose(0, 1).flatten(1)
    heads, size, out = reading.output.shape
    return LayerTrainability(
        name=reading.name, kernel=reading.kernel, path=path,
        parameters=reading.groups * seen.shape[2] * size, outputs=path.rows * out,
        missed=missed, trapped=trapped,
        dead=dead if reading.kernel == "Gaussian" and dead is not None else _one_hot(reading),
        repeated=len(joined) - len(torch.unique(joined, dim=0)),
        gaussian_least=least, gaussian_dead=dead,
    )  # fmt: skip


def _precision(tensor: Tensor) -> float:
    """Relative rounding below which a singular value counts as 0. The numbers of a half-precision
    model are taken as they are; what comes of them is computed in float32."""
    return float(min(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps))


def _predictors(reading: _Reading, rows: int) -> Float[Tensor, "head row width"]:
    """`S_h X` at the first valid tokens, in float64."""
    parts, left = [], rows
    for weights, read, valid in zip(reading.weights, reading.read, reading.valid, strict=True):
        at = valid.nonzero()[:left, 0]
        left -= len(at)
        parts.append((weights[:, at].double() @ read.double()).cpu())
    return torch.cat(parts, 1)


def _rows(reading: _Reading, by_query: Shaped[Tensor, "batch head query"]) -> Tensor:
    """The entries of valid queries, of all heads."""
    return by_query.transpose(1, 2)[reading.valid]


def _one_hot(reading: _Reading) -> float:
    """Share of the softmax rows, of those that see two keys, with all their weight on one."""
    rest = reading.weights.sum(-1) - reading.weights.amax(-1)
    several = (reading.seen.sum(-1) > 1).expand_as(rest)
    counted = _rows(reading, several)
    dead = _rows(reading, rest) < DEAD
    return float(dead[counted].double().mean()) if bool(counted.any()) else 0.0


def _reachable(reading: _Reading) -> tuple[float, float]:
    """Share of directions that softmax misses, and of heads with equal value rows."""
    missed, equal = [], []
    for values, valid in zip(reading.values, reading.valid, strict=True):
        own = values[:, valid].double()
        if own.shape[1] < 2:
            continue
        mean = own.mean(1, keepdim=True)
        apart = (own - mean).norm(dim=-1).amax(1)
        equal.append(apart <= EQUAL * mean.norm(dim=-1)[:, 0])
        precision = max(own.shape[1:]) * _precision(values)
        size = own.norm(dim=-1).amax(1) * precision
        rank = torch.linalg.matrix_rank(own - mean, atol=size, rtol=torch.zeros_like(size))
        missed.append(1 - rank.double() / own.shape[2])
    if not missed:
        return 1.0, 1.0
    return float(torch.cat(missed).mean()), float(torch.cat(equal).double().mean())


def _notes(layers: list[LayerTrainability]) -> tuple[str, ...]:
    notes = []
    wide = [layer for layer in layers if layer.path.wide_enough]
    slow = [layer for layer in wide if layer.steps > STEPS]
    if wide:
        best = max(layer.path.free_rate for layer in wide)
        notes.append(
            f"HD >= Nn holds in {len(wide)} of {len(layers)} layers; in {len(slow)} of them the "
            f"guarantee is useless all the same: more than {STEPS:,.0f} steps for a loss 1,000 "
            f"times smaller (best mu/L {best:.1e})"
        )
    if len(wide) < len(layers):
        notes.append(
            f"HD < Nn in {len(layers) - len(wide)} layers: their value weights cannot fit every "
            "target"
        )
    few = sum(layer.parameters < layer.outputs for layer in layers)
    if few:
        notes.append(
            f"in {few} layers the value weights are fewer than the numbers to fit (rows x output "
            "width), so no rate can hold for every target whatever B is"
        )
    repeated = max((layer.repeated for layer in layers), default=0)
    if repeated:
        notes.append(
            f"up to {repeated} rows of B repeat an earlier one (documents that start alike): such "
            "tokens cannot be told apart, and rank B is below Nn"
        )
    dead = [layer.gaussian_dead for layer in layers if layer.gaussian_dead is not None]
    if dead:
        notes.append(
            "the Gaussian kernel has dead zones of its own: far from all keys its weights and its "
            f"gradient vanish together (up to {max(dead):.0%} of the rows here)"
        )
    return tuple(notes)
