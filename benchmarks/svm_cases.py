"""The instances: random unit tokens, a planted selection of real size, the heads of MiniLM."""

from __future__ import annotations

import numpy as np

from attoscope.svm import Selection


def unit(n: int, tokens: int, width: int, seed: int = 0) -> Selection:
    """n random unit queries, as many sequences of random unit tokens, random choices."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((n, tokens, width))
    queries = rng.standard_normal((n, width))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    queries /= np.linalg.norm(queries, axis=-1, keepdims=True)
    return Selection(keys, queries, rng.integers(0, tokens, n))


def planted(n: int, tokens: int, width: int, seed: int = 0) -> Selection:
    """One sequence of keys; choices made by a random weight; of 2 n queries, the n whose best key
    wins by most are kept, so that the weight has a margin on all."""
    rng = np.random.default_rng(seed)
    keys, queries = rng.standard_normal((tokens, width)), rng.standard_normal((2 * n, width))
    weight = rng.standard_normal((width, width))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    wins, best = np.empty(2 * n), np.empty(2 * n, np.int64)
    for lo in range(0, 2 * n, 256):
        scores = (queries[lo : lo + 256] @ weight.T) @ keys.T
        top = np.partition(scores, -2, axis=1)
        wins[lo : lo + 256] = top[:, -1] - top[:, -2]
        best[lo : lo + 256] = scores.argmax(1)
    keep = np.sort(np.argsort(-wins)[:n])
    return Selection(keys[None], queries[keep], best[keep], np.zeros(n, np.int64))


def minilm(space: str, queries: int = 512, tokens: int = 128) -> list[Selection]:
    """What each head of MiniLM chose on eight news articles, one selection a head."""
    import torch

    from attoscope.trace import Subject, batches
    from attoscope.trace.selections import head_selections
    from examples import assets

    torch.set_num_threads(1)
    subject = Subject.load(assets.minilm())
    texts = [path.read_text() for path in assets.bbc(8)]
    batch = next(batches(subject, texts, max_tokens=tokens, batch_size=8))
    heads = head_selections(subject, batch, space=space, queries=queries)  # type: ignore[arg-type]
    return [head.selection for head in heads]
