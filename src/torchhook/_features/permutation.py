"""A random order of any number of things, in no memory: where each goes is computed, not remembered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_UINT = np.uint64


class Permutation:
    """Numbers below ``size`` in another order, each exactly once; the same for the same ``seed``.

    It is a Feistel network over the next power of four; a number that comes out too large goes in again, until it does
    not, so that what is left is a permutation, too (Black and Rogaway 2002).

    >>> order = Permutation(6, seed=1)
    >>> sorted(order(np.arange(6)).tolist())
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, size: int, seed: int | tuple[int, ...]) -> None:
        self.size = size
        self._bits = max(1, -(-(max(2, size) - 1).bit_length() // 2))  # of each half
        self._mask = _UINT((1 << self._bits) - 1)
        self._keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, _UINT)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """What is at some places of the order."""
        found = self._once(np.asarray(places).astype(_UINT))
        # Less than four numbers are tried for each on the average: the domain is at most four times too large.
        while (outside := np.flatnonzero(found >= _UINT(self.size))).size:
            found[outside] = self._once(found[outside])
        return found.astype(np.int64)

    def _once(self, numbers: NDArray[_UINT]) -> NDArray[_UINT]:
        left, right = numbers >> _UINT(self._bits), numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_hashed(right + key) & self._mask)
        found: NDArray[_UINT] = (left << _UINT(self._bits)) | right
        return found


def _hashed(numbers: NDArray[_UINT]) -> NDArray[_UINT]:
    """The last step of SplitMix64, which mixes every bit into every other."""
    mixed = (numbers ^ (numbers >> _UINT(30))) * _UINT(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> _UINT(27))) * _UINT(0x94D049BB133111EB)
    found: NDArray[_UINT] = mixed ^ (mixed >> _UINT(31))
    return found
