"""Random numbers and permutations that are functions of a key and a place: no state, no library's version in them."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

#: Rounds of the permutation's network; three make it sound, the rest is cheap.
ROUNDS = 6


def key(*parts: str | int) -> int:
    """A number of 64 bits for a list of names and numbers."""
    return int.from_bytes(hashlib.sha256("\n".join(map(str, parts)).encode()).digest()[:8], "little")


def words(x: npt.NDArray[np.int64], seed: int) -> Words:
    """A random word for each of `x` under a 64-bit seed (the finaliser of splitmix64)."""
    z = x.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def below(x: npt.NDArray[np.int64], bound: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """A random whole number from 0 to bound − 1 for each of `x`; bounds are at least 1 and below 2³²."""
    return ((words(x, seed) >> np.uint64(32)) * bound.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def permuted(places: npt.NDArray[np.int64], n: int, seed: int) -> npt.NDArray[np.int64]:
    """Where a permutation of 0 … n − 1 sends `places`, without the permutation ever being written down.

    A Feistel network permutes the next power of four; who lands outside 0 … n − 1 goes on until inside, which keeps
    it a permutation and takes fewer than four turns on average.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [key(seed, turn) for turn in range(ROUNDS)]
    out = places.astype(np.uint64)
    left_over = np.ones(out.shape, dtype=bool)
    while left_over.any():
        x = out[left_over]
        left, right = x >> half, x & mask
        for k in keys:
            left, right = right, left ^ (words(right.astype(np.int64), k) & mask)
        out[left_over] = (left << half) | right
        left_over[left_over] = out[left_over] >= n
    return out.astype(np.int64)
