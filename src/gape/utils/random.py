"""Random numbers as functions of a key and a counter: no state, the same on every device and in every version.

`words64`, `below64` and `permuted` are NumPy's, of 64-bit words: order of training windows, choice of scored ones.
`words32` and `below32` are torch's, of 32-bit words: needle samples, drawn on the model's device, which has no unsigned
64-bit numbers. They carry words below 2³² in int64 and multiply them by constants below 2³¹: nothing overflows. Stored
results have numbers of both, and one cannot give the other's.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

#: Rounds of the permutation's network; three make it sound, the rest is cheap.
ROUNDS = 6
WORD = 0xFFFFFFFF


def key(*parts: object, byteorder: Literal["little", "big"] = "little") -> int:
    """A number of 64 bits for a list of names and numbers: the first bytes of a hash, read in `byteorder`."""
    return int.from_bytes(hashlib.sha256("\n".join(map(str, parts)).encode()).digest()[:8], byteorder)


def words64(counters: Ints, seed: int) -> Words:
    """A random word for each counter under a 64-bit seed (the finaliser of splitmix64)."""
    z = counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def below64(counters: Ints, bound: Ints, seed: int) -> Ints:
    """A random whole number from 0 to bound − 1 for each counter; bounds are at least 1 and below 2³²."""
    return ((words64(counters, seed) >> np.uint64(32)) * bound.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def permuted(indices: Ints, n: int, seed: int) -> Ints:
    """Where a random permutation of 0 … n − 1 sends `indices`; the permutation itself is never written down.

    A Feistel network permutes the next power of four; what lands outside 0 … n − 1 is sent on until it is inside.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [key(seed, turn) for turn in range(ROUNDS)]
    out = indices.astype(np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        x = out[outside]
        left, right = x >> half, x & mask
        for k in keys:
            left, right = right, left ^ (words64(right.astype(np.int64), k) & mask)
        out[outside] = (left << half) | right
        outside[outside] = out[outside] >= n
    return out.astype(np.int64)


def words32(name: str, n: int, *, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Random words start … start + n − 1 of `name`, int64 (n,) from 0 to 2³² − 1; there are 2³² before they repeat."""
    # Imported here: processes that only prepare text never load torch.
    import torch  # noqa: PLC0415

    if not 0 <= start <= start + n <= WORD + 1:
        raise invalid_argument("start", start, f"a place from 0 on with {n} words before 2**32")
    digest = hashlib.sha256(name.encode()).digest()
    x = torch.arange(start, start + n, dtype=torch.int64, device=device)
    for at in (0, 4):
        x = _mix(x.bitwise_xor_(int.from_bytes(digest[at : at + 4], "little")))
    return x


def below32(words: Tensor, bound: Tensor | int) -> Tensor:
    """Words of :func:`words32` as whole numbers from 0 to bound − 1; the bound is at most 2³¹ and broadcasts."""
    return (words * bound) >> 32


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words with little bias (two rounds of multiply and shift); works in place."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x.bitwise_xor_(x >> shift)
        x.mul_(factor).bitwise_and_(WORD)
    return x.bitwise_xor_(x >> 15)
