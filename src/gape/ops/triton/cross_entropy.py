"""From logits to losses and, in the logits' place, to their gradients: one pass over memory.

A program takes a row. It reads the row once for the largest logit and the sum of exponentials, and once more to write
the gradient. The second reading finds the row in the GPU's cache, so that memory sees one reading and one writing.

Rows are padded to a multiple of 16 numbers: a mask at the edge of the padding leaves loads whole, one at the edge of
the vocabulary would cut them into single numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.triton.tiles import LOWEST

#: Warps of a program, which takes a row at a time.
WARPS = 8

#: Loads of a thread that are under way at once.
DEEP = 4

#: Numbers of one load of a thread.
LOAD = 8


@triton.jit
def tile_offsets(DEEP: tl.constexpr, THREADS: tl.constexpr, LOAD: tl.constexpr):
    """Where in a tile each number lies, (THREADS, DEEP, LOAD): neighbours in the first axis are so in memory."""
    thread, load, place = tl.arange(0, THREADS), tl.arange(0, DEEP), tl.arange(0, LOAD)
    return thread[:, None, None] * LOAD + load[None, :, None] * (THREADS * LOAD) + place[None, None, :]


@triton.jit
def add_tile(x, highest, total):
    """The running maximum and sum of exponentials of each thread, (THREADS,), with a tile x taken in."""
    higher = tl.maximum(highest, tl.max(tl.max(x, 2), 1))
    added = tl.sum(tl.sum(tl.exp(x - higher[:, None, None]), 2), 1)
    return higher, total * tl.exp(highest - higher) + added


@triton.jit
def log_sum_exp(
    row_ptr, vocabulary, columns, DEEP: tl.constexpr, THREADS: tl.constexpr, LOAD: tl.constexpr
):  # fmt: skip
    """log Σ exp over the vocabulary of one row; NaN where the row holds NaN or +inf."""
    highest = tl.full((THREADS,), LOWEST, tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    TILE: tl.constexpr = DEEP * THREADS * LOAD
    tile = tile_offsets(DEEP, THREADS, LOAD)
    whole = vocabulary // TILE * TILE
    for start in range(0, whole, TILE):
        highest, total = add_tile(tl.load(row_ptr + start + tile).to(tl.float32), highest, total)
    line = tile_offsets(1, THREADS, LOAD)
    for start in range(whole, vocabulary, THREADS * LOAD):
        x = tl.load(row_ptr + start + line, mask=start + line < columns, other=0.0).to(tl.float32)
        highest, total = add_tile(tl.where(start + line < vocabulary, x, float("-inf")), highest, total)
    top = tl.max(highest, 0)
    return top + tl.log(tl.sum(total * tl.exp(highest - top), 0))


@triton.jit
def logit_gradient(x, log_sum, column, target, counted):
    """The gradient of a loss by its logits x: softmax, less one at the target; 0 where it is not counted."""
    p = tl.exp(x - log_sum)
    return tl.where(counted, tl.where(column == target, p - 1.0, p), 0.0)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, stride, vocabulary, columns,
    IGNORED: tl.constexpr, GRADIENT: tl.constexpr,
    DEEP: tl.constexpr, THREADS: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """Losses (R,) of logits (R, columns) and, if GRADIENT, the logits' gradients in their place."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    counted = target != IGNORED
    known = (target >= 0) & (target < vocabulary)
    # Read before anything is overwritten: the reductions below are where all threads wait for one another.
    picked = tl.load(row_ptr + target, mask=known, other=0.0).to(tl.float32)
    log_sum = log_sum_exp(row_ptr, vocabulary, columns, DEEP, THREADS, LOAD)
    # A target that does not exist is nothing to be silent about.
    log_sum = tl.where(known, log_sum, float("nan"))
    tl.store(losses_ptr + row, tl.where(counted, log_sum - picked, 0.0))
    if GRADIENT:
        at = target.to(tl.int32)
        TILE: tl.constexpr = DEEP * THREADS * LOAD
        tile = tile_offsets(DEEP, THREADS, LOAD)
        whole = vocabulary // TILE * TILE
        for start in range(0, whole, TILE):
            x = tl.load(row_ptr + start + tile).to(tl.float32)
            g = logit_gradient(x, log_sum, start + tile, at, counted)
            tl.store(row_ptr + start + tile, g.to(logits_ptr.dtype.element_ty))
        line = tile_offsets(1, THREADS, LOAD)
        for start in range(whole, columns, THREADS * LOAD):
            inside = start + line < columns
            x = tl.load(row_ptr + start + line, mask=inside, other=0.0).to(tl.float32)
            g = logit_gradient(x, log_sum, start + line, at, counted & (start + line < vocabulary))
            tl.store(row_ptr + start + line, g.to(logits_ptr.dtype.element_ty), mask=inside)


def score_rows(logits: Tensor, targets: Tensor, vocabulary: int, ignored: int, gradient: bool) -> Tensor:
    """The cross entropy of each row.

    Args:
        logits: (R, columns), float32, bfloat16 or float16, of which the first `vocabulary` columns count; rows are
            contiguous. Overwritten with their gradients, 0 beyond the vocabulary, if `gradient`.
        targets: int64 (R,), from 0 to vocabulary - 1, or `ignored`.
        vocabulary: V, at most the columns.
        ignored: the target that counts for nothing: no loss, no gradient, whatever the row holds.
        gradient: whether gradients are wanted.

    Returns:
        float32 (R,). NaN, and a gradient of NaN, where the row holds NaN or +inf or the target does not exist.
    """
    losses = torch.empty(logits.size(0), dtype=torch.float32, device=logits.device)
    if logits.size(0):
        with torch.cuda.device_of(logits):
            _cross_entropy_kernel[(logits.size(0),)](
                logits, targets.contiguous(), losses, logits.stride(0), vocabulary, logits.size(1),
                IGNORED=ignored, GRADIENT=gradient, DEEP=DEEP, THREADS=32 * WARPS, LOAD=LOAD, num_warps=WARPS,
            )  # fmt: skip
    return losses
