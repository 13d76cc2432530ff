"""What the Triton kernels take: devices, dtypes, sizes, and when a call is one for the decode kernel."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

#: Queries up to which the decode kernel is meant.
DECODE_QUERIES = 16

#: Widest head that the kernels' tiles were made for.
TRITON_WIDTH = 256

#: Programs that CUDA takes along the second axis of a launch: kernels have one for each head, or each key head, of each
#: sample there.
MOST_PROGRAMS = 65_535

HALVES = (torch.bfloat16, torch.float16)

#: Looked up once: a compiler cannot trace the search.
HAS_TRITON = find_spec("triton") is not None


def triton_cannot(q: Tensor, v: Tensor) -> str | None:
    """Why no kernel can run for q (B, Hq, Nq, D) and v (B, Hk, Nk, Dv); None where they can."""
    obstacles = {
        "is not installed: pip install triton": not HAS_TRITON,
        "needs a CUDA device": not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1",
        "has no float64": q.dtype == torch.float64,
        "has no bfloat16 in Triton's interpreter, whose products of it are wrong": (
            not q.is_cuda and q.dtype == torch.bfloat16
        ),
        f"takes up to {MOST_PROGRAMS:,} heads": q.size(1) > MOST_PROGRAMS,
        f"takes head dims of up to {TRITON_WIDTH}": max(q.size(-1), v.size(-1)) > TRITON_WIDTH,
    }
    return next((reason for reason, holds in obstacles.items() if holds), None)


def decode_cannot(q: Tensor, k: Tensor, v: Tensor, *, learns: bool) -> str | None:
    """Why the decode kernel cannot run a call; None where it can. `learns`: a gradient will be asked for."""
    if learns:
        return "has no backward pass"
    if q.size(2) > DECODE_QUERIES:
        return f"is for up to {DECODE_QUERIES} queries"
    if q.size(0) * k.size(1) > MOST_PROGRAMS:
        return f"takes up to {MOST_PROGRAMS:,} key heads, those of all samples together"
    return triton_cannot(q, v)


def decodes(q: Tensor, k: Tensor, v: Tensor, *, learns: bool) -> bool:
    """Whether a call runs in the decode kernel by default: few queries on a GPU, in half precision, without a gradient.

    Such queries find more keys at every token. cuDNN, which torch picks for them, plans anew for each number of keys;
    the kernel is compiled once.

    Args:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv).
        learns: whether a gradient will be asked for.
    """
    return q.is_cuda and q.dtype in HALVES and decode_cannot(q, k, v, learns=learns) is None
