"""Next-token data: contexts of token numbers with a label that occurs in the context."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from attoscope.tasks.instances import check_sizes


@dataclass(frozen=True, eq=False)
class NextTokenData:
    """Contexts, their next tokens, and one embedding per token.

    Fields: `embeddings` (vocabulary, width), `sequences` (sequence, position) of token numbers,
    the query being the last, `labels` (sequence,), each among the tokens of its sequence.
    """

    embeddings: Float[np.ndarray, "vocabulary width"]
    sequences: Int[np.ndarray, "sequence position"]
    labels: Int[np.ndarray, " sequence"]


def next_token_contexts(
    seed: int, K: int = 6, d: int = 8, sequences: int = 6, length: int = 4
) -> NextTokenData:
    """Random contexts over K tokens with Gaussian embeddings in R^d, of norm 1.

    Tokens of a context are drawn with replacement, labels from its positions.
    Source: arXiv 2403.08081.
    """
    check_sizes(K=K, d=d, sequences=sequences, length=length)
    rng = np.random.default_rng(seed)
    embeddings = rng.standard_normal((K, d))
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    contexts = rng.integers(0, K, (sequences, length))
    labels = contexts[np.arange(sequences), rng.integers(0, length, sequences)]
    return NextTokenData(embeddings, contexts, labels)
