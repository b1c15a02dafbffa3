"""Small instances for a trained prompt p: logits p^T x, the weight (width, 1) being p."""

from __future__ import annotations

import numpy as np

from attoscope.tasks.instances import Instance


def prompt_sequences(third: tuple[float, float] = (0.5, 1.0)) -> Instance:
    """Three sequences of two tokens, the zero token and (1, 1), (1, -1) or `third`.

    Labels +1, -1, +1 and head (0, 1): the second token of each sequence is optimal. The smallest
    prompt that selects it is (4/3, 1/3). With the third token at (0.5, 1.5) its sequence is no
    support vector of the head, so that training the head too asks only a margin of 0 of it, and
    the smallest prompt is (1, 0). Source: arXiv 2306.13596, joint training.
    """
    tokens = np.zeros((3, 2, 2))
    tokens[:, 1] = [(1.0, 1.0), (1.0, -1.0), third]
    labels = np.array([1.0, -1.0, 1.0])
    return Instance(tokens, np.ones((3, 1)), labels, np.array([0.0, 1.0]))


def single_prompt(third_score: float = 0.9) -> Instance:
    """One sequence with the keys (-0.1, 1), (1, 0), (0, 0) and the scores 1, 0.9, `third_score`.

    A token is its key and its score: width 3, head (0, 0, 1). The prompt sees the key alone,
    `tokens[..., :2]`. With the third score at 0.9 selecting the second token is not locally
    optimal, as its support ties; with 0 it is. Source: arXiv 2306.13596, single input.
    """
    tokens = np.array([[[-0.1, 1.0, 1.0], [1.0, 0.0, 0.9], [0.0, 0.0, third_score]]])
    return Instance(tokens, np.ones((1, 1)), np.ones(1), np.array([0.0, 0.0, 1.0]))
