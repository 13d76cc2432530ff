"""Random words that are a function of a name and a counter, the same on every device and in every version of torch.

A generator of torch gives other numbers on a GPU than on a CPU. These words come from a hash of whole numbers below
2³², carried in int64 and multiplied by constants below 2³¹, so nothing overflows and nothing is rounded.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from gape.utils.validation import invalid_argument

WORD = 0xFFFFFFFF


def words(name: str, n: int, *, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Random words start … start + n − 1 of `name`, int64 (n,) between 0 and 2³² − 1.

    Raises:
        ValueError: words from 2³² on, where they would repeat, or before 0.
    """
    if not 0 <= start <= start + n <= WORD + 1:
        raise invalid_argument("start", start, f"a place from 0 on with {n} words before 2**32")
    digest = hashlib.sha256(name.encode()).digest()
    keys = [int.from_bytes(digest[at : at + 4], "little") for at in (0, 4)]
    x = torch.arange(start, start + n, dtype=torch.int64, device=device)
    for key in keys:
        x = _mixed(x.bitwise_xor_(key))
    return x


def below(word: Tensor, bound: Tensor | int) -> Tensor:
    """Words as whole numbers from 0 to bound − 1, bound at most 2³¹ (a tensor that broadcasts, or a number)."""
    return (word * bound) >> 32


def _mixed(x: Tensor) -> Tensor:
    """A bijection of the words with little bias (two rounds of multiply and shift); works in place."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x.bitwise_xor_(x >> shift)
        x.mul_(factor).bitwise_and_(WORD)
    return x.bitwise_xor_(x >> 15)
