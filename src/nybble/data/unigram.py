"""The score of a model that knows only how often each token occurs: what training has to beat."""

import numpy as np
from numpy.typing import NDArray


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy of the token distribution, nats a token. `counts` [vocab]."""
    seen = counts[counts > 0].astype(np.float64)
    total = seen.sum()
    if total == 0:
        return 0.0
    return float(np.log(total) - (seen * np.log(seen)).sum() / total)


def cross_entropy(counts: NDArray[np.int64], model_counts: NDArray[np.int64]) -> float:
    """Loss of the unigram model of `model_counts` on text with `counts`, nats a token. Both [vocab].

    One is added to every count of the model, so that a token it has never seen costs much, but not infinity.
    """
    total = counts.sum()
    if total == 0:
        return 0.0
    log_probability = np.log(model_counts + 1.0) - np.log(float(model_counts.sum() + len(model_counts)))
    return float(-(counts * log_probability).sum() / total)
