"""A seeded permutation of range(n) that needs no memory: any position of any epoch is computed at once.

A balanced Feistel network over the smallest domain 4^h >= n, with cycle walking (Black & Rogaway 2002):
values that fall outside range(n) are permuted again until they fall inside. Round keys come from BLAKE2b of
seed and epoch, so the order is the same on every machine and with every version of numpy.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


class Permutation:
    """Bijection on range(size); `permutation(indices)` maps an int64 array of any shape."""

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        if size < 1:
            raise ValueError(f"size is {size}, must be at least 1")
        self.size = size
        self.half_bits = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
        self.round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Images of `indices`, each in range(size)."""
        values = self._feistel(np.atleast_1d(indices).astype(np.uint64))
        outside = values >= np.uint64(self.size)
        while outside.any():
            values[outside] = self._feistel(values[outside])
            outside = values >= np.uint64(self.size)
        return values.astype(np.int64).reshape(np.shape(indices))

    def _feistel(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_mask = (np.uint64(1) << self.half_bits) - np.uint64(1)
        left, right = values >> self.half_bits, values & low_mask
        for key in self.round_keys:
            left, right = right, left ^ (_mix(right ^ key) >> (np.uint64(64) - self.half_bits))
        return (left << self.half_bits) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al. 2014): every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
