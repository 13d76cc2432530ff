"""Numbers cut into pieces that a short dtype holds exactly."""

from __future__ import annotations

import torch
from torch import Tensor

#: A power of two that moves magnitude between the two sides of a product, so that float16 does not overflow.
UNIT = 256.0

_SIGNIFICAND = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


def significand_bits(x: Tensor) -> int:
    """Bits of significand that a matrix product of x's dtype keeps; TF32 keeps 11 of float32's 24."""
    if x.dtype == torch.float32 and x.is_cuda and tf32_allowed():
        return 11
    return _SIGNIFICAND[x.dtype]


def tf32_allowed() -> bool:
    """Whether matrix products in float32 may run in TF32 on a GPU, in whichever way that was set."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        return bool(matmul.allow_tf32)
    # Asking the older switch raises once the newer one was used.
    chosen = matmul.fp32_precision
    if chosen == "none":
        chosen = getattr(torch.backends, "fp32_precision", "none")
    return bool(chosen == "tf32")


def round_significand(x: Tensor, bits: int) -> Tensor:
    """x (float32 or float64) rounded to `bits` of significand, half to even, same dtype and no gradient.

    Done on the integer view: a cast there and back is what a compiler removes.
    """
    size, whole = (torch.int32, 24) if x.dtype == torch.float32 else (torch.int64, 53)
    drop = whole - bits
    if drop <= 0:
        return x.detach()
    raw = x.detach().view(size)
    odd = (raw >> drop) & 1
    return ((raw + ((1 << (drop - 1)) - 1) + odd) & -(1 << drop)).view(x.dtype)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded` with the gradient of x."""
    return x + (rounded - x).detach()


def pieces(x: Tensor, bits: int, count: int = 3) -> list[Tensor]:
    """Tensors of `bits` significand that add up to x, to `count` times as many bits.

    The first carries x's gradient: all of them meet the same partner, so one has the whole of it.
    """
    rest, parts = x.detach(), []
    for _ in range(count):
        parts.append(round_significand(rest, bits))
        rest = rest - parts[-1]
    return [straight_through(x, parts[0]), *parts[1:]]
