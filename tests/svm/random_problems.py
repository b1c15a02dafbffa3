"""Small random problems of eight kinds, made to be awkward."""

from __future__ import annotations

import numpy as np

from attoscope.svm import Selection

KINDS = (
    "ties",
    "duplicates",
    "rank one",
    "equal queries",
    "unit",
    "several",
    "bias",
    "required",
)


def small(seed: int) -> Selection:
    """Up to six queries, tokens and dimensions: n = 1, d = 1 and T = 2 among them."""
    rng = np.random.default_rng(seed)
    n, tokens = rng.integers(1, 7), rng.integers(2, 7)
    key_width, width = rng.integers(1, 6), rng.integers(1, 6)
    kind = KINDS[seed % len(KINDS)]
    keys = rng.standard_normal((n, tokens, key_width))
    queries = rng.standard_normal((n, width))
    if kind == "ties":
        keys, queries = np.round(keys), np.round(queries) + (np.round(queries) == 0)
    if kind == "duplicates":
        keys[:, -1] = keys[:, 0]
    if kind == "rank one":
        keys = keys[..., :1] * np.ones(key_width)
    if kind == "equal queries" and n > 1:
        queries[1] = queries[0]
    if kind == "unit":
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    selection = Selection(keys, queries, rng.integers(0, tokens, n))
    if kind == "duplicates" and (seed // len(KINDS)) % 2:
        pairs = selection.duplicates()
        return (
            selection.without(pairs) if len(pairs) < selection.constraint_count else selection
        )
    if kind == "several":
        chosen = selection.selected.copy()
        chosen[np.arange(n), rng.integers(0, tokens, n)] = True
        return selection if chosen.all() else selection.replace(selected=chosen)
    if kind == "bias":
        return selection.replace(bias=rng.standard_normal((n, tokens)))
    if kind == "required":
        return selection.replace(required=rng.choice([0.0, 1.0, 2.0, -0.5], (n, tokens)))
    return selection


def unit(n: int, tokens: int, width: int, seed: int = 0) -> Selection:
    """Random unit tokens and queries, random choices: as in the benchmark."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((n, tokens, width))
    queries = rng.standard_normal((n, width))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    queries /= np.linalg.norm(queries, axis=-1, keepdims=True)
    return Selection(keys, queries, rng.integers(0, tokens, n))
