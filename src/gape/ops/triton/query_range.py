"""The kernel of :func:`gape.ops.query_range.measure_queries`: one pass over queries and keys."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.triton.configs import power_of_two
from gape.ops.triton.custom_ops import Launch
from gape.ops.triton.decode_prologue import or_infinite
from gape.ops.triton.prologue import side_by_side
from gape.ops.triton.tiles import load_rows, owner, single

#: Tokens that a program reads at once, and how many times.
ROWS = 64
TIMES = 4


@triton.jit(do_not_specialize_on_alignment=("reach_ptr", "own_ptr"))
def _query_range_kernel(
    q_ptr, k_ptr, reach_ptr, own_ptr, q_b, q_h, q_n, k_b, k_h, k_n, n_heads, groups, n, d, scale,
    PARTIAL: tl.constexpr, ROWS: tl.constexpr, TIMES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program has TIMES · ROWS tokens of one head of q, and the keys of the same tokens. PARTIAL: BLOCK_D > d."""
    batch, head, key_head, _ = owner(n_heads, groups)
    q_ptr += batch * q_b + head * q_h
    k_ptr += batch * k_b + key_head * k_h
    reach, own = tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    first = tl.program_id(0) * (TIMES * ROWS)
    for start in tl.range(first, tl.minimum(first + TIMES * ROWS, n), ROWS):
        q = load_rows(q_ptr, start, q_n, 1, n, d, ROWS, BLOCK_D, True, PARTIAL).to(tl.float32)
        k = load_rows(k_ptr, start, k_n, 1, n, d, ROWS, BLOCK_D, True, PARTIAL).to(tl.float32)
        reach = tl.maximum(reach, or_infinite(tl.sqrt(tl.sum(q * q, 1))))
        inside = tl.arange(0, ROWS) < n - start
        own = tl.maximum(own, tl.where(inside, or_infinite(-single(scale) * tl.sum(q * k, 1)), float("-inf")))
    tl.atomic_max(reach_ptr + head, single(scale) * tl.max(reach, 0))
    tl.atomic_max(own_ptr + head, tl.max(own, 0))


def measure_queries(q: Tensor, k: Tensor, reach: Tensor, own: Tensor, *, scale: float) -> None:
    """:func:`gape.ops.query_range.measure_queries`."""
    q, k = side_by_side(q), side_by_side(k)
    _launch(q.shape, q.stride()[:3], k.size(1), k.stride()[:3], scale, q.dtype, q.device)(q, k, reach, own)


@functools.lru_cache(maxsize=64)
def _launch(
    shape: torch.Size, strides: tuple[int, ...], key_heads: int, key_strides: tuple[int, ...], scale: float,
    dtype: torch.dtype, device: torch.device,
) -> Launch:  # fmt: skip
    """The launch for q and k of these sizes; dtype and device tell launches apart."""
    batch, heads, n, d = shape
    block = max(16, power_of_two(d))
    flags = {"PARTIAL": block != d, "ROWS": ROWS, "TIMES": TIMES, "BLOCK_D": block, "num_warps": max(4, block // 32)}
    numbers = (*strides, *key_strides, heads, heads // key_heads, n, d, scale)
    return Launch(_query_range_kernel, (-(-n // (ROWS * TIMES)), batch * heads), numbers, flags)
