"""`treat`: apply a remedy to a live model."""

from __future__ import annotations

from typing import Any

from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.building import REMEDIES, Plan, apply_plan
from attoscope.remedies.finding import Found
from attoscope.remedies.kinds import openers
from attoscope.remedies.probe import probe_batch
from attoscope.remedies.splitting import Split, split_attention
from attoscope.remedies.treatment import Treatment
from attoscope.trace import Subject


def treat(
    model: Any,
    remedy: str,
    data: Any = None,
    *,
    layers: Any = None,
    **options: Any,
) -> Treatment:
    """Change a live model so that its tokens stay apart or it trains at depth; give the way back.

    Remedies, with A the attention, V a head's values, J V their mean over the keys that a query may
    see, and what each computes in place of A V:

    - "neutreno": `A V + strength (V^0 - V)`, V^0 the first layer's values. Options `strength` (0.6;
      0 leaves the model as it is) and `anchor` ("first"; "zero" and "mean" for comparison).
    - "value_residual": `A (shares[0] V^0 + shares[1] V)`. Options `shares` ((0.5, 0.5)) and
      `learnable` (False).
    - "attnscale": `J V + (1 + w_h)(A V - J V)`, one new parameter w per head, 0 at the start.
    - "centred": `A V - strength J V`. Option `strength` (1.0).
    - "featscale": with Z the output of the output projection, `(1 + s) J Z + (1 + t)(Z - J Z)`;
      new parameters s and t, as wide as the stream, 0 at the start.
    - "spectral": value and output weights become Q and `Lambda Q^T`, so that the layer's map has
      the eigenvalues Lambda, in [-1, 0] ("sharpen") or [0, 1] ("smooth"). Options `mode`
      ("sharpen"), `clip` ("linear" or "square"), `start` ("nearest", or "random" with a `seed`).

    - "gaussian": weights `exp(-|q - k|^2 / (2 sqrt(d)))`, not divided by their sum, in place of the
      softmax: for models that are trained with it. Options `normalize` (False) and `learnable`
      (False: a bandwidth per head).

    Remedies for post-norm models, `norm(omega x + f(x))` at every residual addition:

    - "admin": omega from the variances of one forward pass in training mode, on `data`, or in
      closed form. Options `scale` ("profile"; "O(n)", "O(logn)", "O(1)"), `trainable` (True),
      `vector` (True: one omega per feature; else one number) and `seed` (0, of the dropout).
    - "deepnet": one omega by depth, and Xavier normal weights with a small gain. Options
      `reinitialise` (True; undo gives the former weights back) and `seed` (0, of the weights).

    Both can be folded into a plain post-norm model.

    For pre-norm and post-norm models, `lambda x + beta f(x)` at every residual addition:

    - "deepscalelm": all weights drawn anew, so that variance and gradients stay near 1 at any
      depth; `beta^2 = k / N^alpha`, `lambda^2 = 1 - beta^2`. Options `count` (what N is: "layers"
      or "sublayers"), `k` (2), `alpha` (1), `r0` (the token correlation at the start; None:
      measured on `data`, 0.221 without), `reinitialise` (True) and `seed` (0). Can be folded.

    Nothing depends on names: attention, its projections, its masks and the residual additions are
    found by running the model once. Remedies on attention leave cross-attention alone. Treat
    before the optimizer is built.

    Args:
        model: any Hugging Face model or torch module with softmax attention, or a `Subject`; it is
            changed in place.
        remedy: one of the names above.
        data: what the model reads, as for `attoscope.diagnose`; most Hugging Face models need none
            (those that read token ids or pixels and nothing else).
        layers: (first, end) to treat only some layers of each stack.
        options: of the remedy.

    Raises `AttoscopeError` for a model or options that the remedy does not fit; the model is then
    as it was. Sources: arXiv 2312.00751 (neutreno), 2410.17897 (value residuals), 2203.05962
    (attnscale, featscale), 2306.01610 (centred), 2401.04301 (spectral),
    2004.08249 (admin), 2203.00555 (deepnet), 2403.09635
    (deepscalelm).
    """
    module = model.model if isinstance(model, Subject) else model
    _check_model(module)
    if not isinstance(remedy, str) or remedy not in REMEDIES:
        raise AttoscopeError(
            f"remedy: got {remedy!r}; expected one of {', '.join(sorted(REMEDIES))}"
        )
    kind = REMEDIES[remedy]
    chosen = kind.options(options)
    subject = model if isinstance(model, Subject) else Subject.of(module)
    batch = probe_batch(subject, data)
    inputs = "made-up inputs" if data is None else "this data"
    split = split_attention(subject, batch) if kind.splits else Split()
    try:
        subject._layout = None  # the replaced modules have other names in them
        found = kind.find(subject, batch, data, chosen)
        plan = _plan(remedy, chosen, found, layers, split.names)
        notes = [*found.notes, *_signs(chosen), *kind.warnings(subject, batch, chosen, inputs)]
        return apply_plan(module, plan, split, notes=notes, fresh=True)
    except BaseException:
        split.undo()
        raise


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise AttoscopeError(
            f"model: got {type(model).__name__}; expected a live torch module, which a path or hub "
            "id is not; load it first"
        )
    away = [name for name, p in model.named_parameters() if p.is_meta]
    if away:
        raise AttoscopeError(
            f"model: got weights on the meta device ({away[0]}), that is, not there; load them "
            "first"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            raise AttoscopeError(
                f"model: weights are not finite in {name}; expected numbers, as the places of a "
                "remedy are found by running the model; load an earlier checkpoint"
            )


def _signs(options: dict[str, Any]) -> list[str]:
    """A note where a strength or a share turns a remedy round."""
    notes = []
    if isinstance(options.get("strength"), int | float) and options["strength"] < 0:
        notes.append(
            f"strength: {options['strength']} is below 0, so the term acts the other way and "
            "may make tokens more alike"
        )
    shares = options.get("shares")
    if isinstance(shares, tuple) and min(shares) < 0:
        notes.append(f"shares: {shares} has a number below 0, so those values are subtracted")
    return notes


def _plan(
    remedy: str,
    options: dict[str, Any],
    found: Found,
    layers: Any,
    split: tuple[str, ...],
) -> Plan:
    if not found.places:
        raise AttoscopeError(
            f"{remedy}: 0 self-attention layers matched; expected a model with self-attention"
        )
    anchored = REMEDIES[remedy].anchored
    first = {id(place) for place in openers(found.places).values() if anchored}
    low, end = _span(layers, max(place.layer for place in found.places) + 1)
    # The first layer gives the anchor, whether or not it is treated itself.
    kept = [p for p in found.places if low <= p.layer < end or id(p) in first]
    shared = len({(p.value, p.output) for p in found.places}) < len(found.places)
    if shared and layers is not None:
        raise AttoscopeError(
            f"layers: got {layers} for a model whose layers share their weights; expected None, as "
            "one cannot be treated without the others"
        )
    return Plan(remedy, options, tuple(kept), len(found.places), split)


def _span(layers: Any, count: int) -> tuple[int, int]:
    """(first, end), within the layers that there are."""
    if layers is None:
        return 0, count
    pair = isinstance(layers, tuple | list) and len(layers) == 2
    whole = pair and all(isinstance(n, int) and not isinstance(n, bool) for n in layers)
    if not whole or not 0 <= layers[0] < layers[1] <= count:
        raise AttoscopeError(
            f"layers: got {layers!r}; expected None for all, or whole numbers "
            f"(first, end) with 0 <= first < end <= {count}"
        )
    return layers[0], layers[1]
