"""Signal and noise tokens with some labels flipped: does the selector memorise the noise?"""

from __future__ import annotations

import numpy as np

from attoscope.errors import AttoscopeError
from attoscope.tasks.instances import Instance, check_sizes


def label_noise_tokens(
    seed: int,
    n: int = 20,
    T: int = 8,
    d: int = 2000,
    *,
    signal: float = 20.0,
    rho: float = 0.1,
    flips: float = 0.2,
) -> Instance:
    """One relevant and two weakly relevant tokens per sequence, in Gaussian noise.

    The first half of the sequences is of class +1, with mu_1 = signal e_1, the rest of class -1,
    with mu_2 = signal e_2. Token 0 carries mu of the class, token 1 rho times it, token 2 rho times
    that of the other class; all tokens carry noise N(0, I). The labels of the first
    ceil(flips n) // 2 of each class are flipped. The head is (mu_1 - mu_2) / ||mu_1 - mu_2||
    divided by `signal`. A test set is one of another seed without flips. The published code draws
    it with the seed of the training set, so that its first n sequences share their noise.

    Raises `AttoscopeError` for sizes that do not fit and shares outside 0 to 1.
    Source: arXiv 2409.17625, synthetic experiments.
    """
    check_sizes(n=n, T=T, d=d)
    if T < 3 or d < 2:
        raise AttoscopeError(
            f"T, d: got {T} tokens of width {d}; expected at least 3 tokens and width 2"
        )
    _check_share("flips", flips)
    if not signal > 0 or not rho > 0:
        raise AttoscopeError(f"signal, rho: got {signal} and {rho}; expected positive numbers")
    tokens = np.random.default_rng(seed).standard_normal((n, T, d))
    half = n // 2
    clean = np.where(np.arange(n) < half, 1.0, -1.0)
    own = np.where(clean > 0, 0, 1)
    row = np.arange(n)
    tokens[row, 0, own] += signal
    tokens[row, 1, own] += rho * signal
    tokens[row, 2, 1 - own] += rho * signal
    wrong = int(np.ceil(n * flips)) // 2
    flipped = (row < wrong) | ((row >= half) & (row < half + wrong))
    head = np.zeros(d)
    head[:2] = np.array([1.0, -1.0]) / (np.sqrt(2.0) * signal)
    return Instance(tokens, np.ones((n, 1)), np.where(flipped, -clean, clean), head, flipped)


def two_token_signal_noise(
    seed: int, n: int = 50, d: int = 4000, *, snr: float = 1.0, flips: float = 0.1
) -> Instance:
    """One signal token and one noise token per sequence.

    Token 0 is y mu with the clean label y, a random sign, and mu = snr sqrt(d) e_1; token 1 is
    N(0, I) without its part along mu. round(flips n) labels, drawn at random, are flipped. The
    head is mu / ||mu||, the truth for one that is trained.

    Raises `AttoscopeError` for sizes that do not fit and shares outside 0 to 1.
    Source: arXiv 2410.07746, with SNR = ||mu|| / sqrt(d).
    """
    check_sizes(n=n, d=d)
    if d < 2 or not snr > 0:
        raise AttoscopeError(
            f"d, snr: got {d} and {snr}; expected a width of at least 2 and a positive ratio"
        )
    _check_share("flips", flips)
    rng = np.random.default_rng(seed)
    clean = rng.choice([-1.0, 1.0], n)
    tokens = np.zeros((n, 2, d))
    tokens[:, 0, 0] = clean * snr * np.sqrt(d)
    tokens[:, 1, 1:] = rng.standard_normal((n, d - 1))
    flipped = rng.permutation(n) < round(flips * n)
    head = np.zeros(d)
    head[0] = 1.0
    return Instance(tokens, np.ones((n, 1)), np.where(flipped, -clean, clean), head, flipped)


def _check_share(name: str, share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise AttoscopeError(f"{name}: got {share}; expected a share from 0 to 1")
