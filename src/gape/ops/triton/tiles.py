"""What kernels of attention share: who sees whom, rows of a tile, and which tiles may be skipped."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.inputs import Problem
from gape.ops.triton.configs import tiles_for
from gape.ops.triton.custom_ops import traceable

#: What turns a natural logarithm into one in base 2.
LOG2E = math.log2(math.e)

#: Where a running maximum starts: below every finite number and, unlike -inf, no trouble when subtracted from itself.
LOWEST = tl.constexpr(-3.4028234663852886e38)

#: Tokens in one unit of a position's far part, and the bits below it.
FAR = tl.constexpr(8388608)
NEAR_BITS = tl.constexpr(23)

#: Keys after which local positions start from zero again: a multiple of every tile's keys.
SPAN = tl.constexpr(128)

#: Neighbouring tiles that are judged at once, a bit of one number each: the more, the longer the runs of tiles whose
#: loads are pipelined.
GROUP = tl.constexpr(32)


class Layout(NamedTuple):
    """Who sees whom, as the kernels take it: tensors or None, and a flag."""

    q_positions: Tensor | None
    k_positions: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    mask: Tensor | None
    causal: bool

    @property
    def flags(self) -> dict[str, bool]:
        """What kernels are compiled for."""
        positions, documents = self.q_positions is not None, self.q_documents is not None
        return {
            "CAUSAL": self.causal, "HAS_POSITIONS": positions, "HAS_DOCUMENTS": documents,
            "HAS_MASK": self.mask is not None,
        }  # fmt: skip

    @property
    def plain(self) -> bool:
        """Whether the order is that of the tensors and causality is all there is: where tiles may be skipped."""
        return self.causal and all(x is None for x in self[:5])


#: Tokens in index order.
CAUSAL = Layout(None, None, None, None, None, causal=True)


def layout_of(problem: Problem) -> Layout:
    """The problem's visibility in the form that the kernels take, expanded to its full sizes."""
    visibility, batch = problem.visibility, problem.q.size(0)
    q_positions, k_positions, q_documents, k_documents = (
        None if x is None else x.expand(batch, -1)
        for x in (visibility.q_positions, visibility.k_positions, visibility.q_documents, visibility.k_documents)
    )
    mask = visibility.attn_mask
    if mask is not None:
        mask = mask.expand(batch, problem.q.size(1), visibility.n_q, visibility.n_k)
    return Layout(q_positions, k_positions, q_documents, k_documents, mask, visibility.is_causal)


def strides_of(*tensors: Tensor | None, axes: int = 2) -> list[int]:
    """Strides of tensors with so many axes, zeros for those that are not there."""
    return [stride for x in tensors for stride in ((0,) * axes if x is None else x.stride())]


@triton.jit
def owner(n_heads, groups):
    """Whose tile this program has: sample, head, key head, and the key head counted through all samples; int64."""
    batch = (tl.program_id(1) // n_heads).to(tl.int64)
    head = (tl.program_id(1) % n_heads).to(tl.int64)
    key_head = head // groups
    return batch, head, key_head, batch * (n_heads // groups) + key_head


@triton.jit
def single(x):
    """A number in float32: a compiler may pass Python's floats in double precision."""
    return tl.cast(x, tl.float32)


@triton.jit
def anchor_of(ptr, stride, start, HAS_POSITIONS: tl.constexpr, COPIES: tl.constexpr):
    """What positions of a tile of keys are counted from: its first key's, with COPIES of exposures its span's."""
    if HAS_POSITIONS:
        return tl.load(ptr + start * stride)
    else:  # noqa: RET505
        return start // SPAN * SPAN if COPIES else start


@triton.jit
def local_positions(ptr, stride, offsets, n, anchor, first, HAS_POSITIONS: tl.constexpr):
    """Positions of tokens `offsets`, counted from `anchor`, as float32: the near part and the far one, in 2²³ tokens.

    In index order, where `first` is the position of token 0, the near part is all there is.
    """
    if HAS_POSITIONS:
        local = tl.load(ptr + offsets * stride, mask=offsets < n, other=0) - anchor
        return (local & (FAR - 1)).to(tl.float32), (local >> NEAR_BITS).to(tl.float32)
    local = (offsets + (first - anchor)).to(tl.float32)
    return local, local


@triton.jit
def distances(i, i_far, j, j_far):
    """i − j of explicit positions: both differences are exact, so their sum is rounded once and has the right sign."""
    return (i - j) + (i_far - j_far) * FAR


@triton.jit
def load_rows(
    ptr, start, stride_n, stride_d, n, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, CHECK_N: tl.constexpr, CHECK_D: tl.constexpr,
):  # fmt: skip
    """Rows start … start + ROWS − 1 of a (N, D) matrix, zero past its ends; a check that is not needed costs nothing.

    Only the tile's first row is far away, so only its offset takes 64 bits.
    """
    rows, dims = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    pointers = ptr + tl.cast(start, tl.int64) * stride_n + (rows * stride_n + dims * stride_d)
    if CHECK_N and CHECK_D:
        return tl.load(pointers, mask=(rows < n - start) & (dims < d), other=0.0)
    if CHECK_N:
        return tl.load(pointers, mask=rows < n - start, other=0.0)
    if CHECK_D:
        return tl.load(pointers, mask=dims < d, other=0.0)
    return tl.load(pointers)


@triton.jit
def load_parts(
    ptr, start, stride_n, stride_d, n, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, CHECK_N: tl.constexpr, CHECK_D: tl.constexpr,
):  # fmt: skip
    """Rows as :func:`load_rows` has them, in two parts with REST: half of WIDTH, and REST coordinates behind it.

    Blocks are powers of two. Heads of 96 as 64 + 32 cost a quarter less in matrix units than as 128.
    """
    if REST:
        first = load_rows(ptr, start, stride_n, stride_d, n, d, ROWS, WIDTH // 2, CHECK_N, False)
        behind = ptr + WIDTH // 2 * stride_d
        return first, load_rows(behind, start, stride_n, stride_d, n, d, ROWS, REST, CHECK_N, False)
    else:  # noqa: RET505
        whole = load_rows(ptr, start, stride_n, stride_d, n, d, ROWS, WIDTH, CHECK_N, CHECK_D)
        return whole, whole


@triton.jit
def products(a, a_rest, b, b_rest, REST: tl.constexpr):
    """a bᵀ of rows in parts."""
    if REST:
        # The small part first: the second product waits for the one before.
        s = tl.dot(a_rest, tl.trans(b_rest), input_precision="ieee")
        return tl.dot(a, tl.trans(b), s, input_precision="ieee")
    else:  # noqa: RET505
        return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def add_weighted(weights, x, x_rest, acc, acc_rest, REST: tl.constexpr):
    """Add weights · x to sums in parts."""
    acc = tl.dot(weights, x, acc, input_precision="ieee")
    if REST:
        acc_rest = tl.dot(weights, x_rest, acc_rest, input_precision="ieee")
    return acc, acc_rest


@triton.jit
def empty_parts(ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    """Sums of rows in parts, in float32, before anything is added."""
    first = tl.zeros((ROWS, WIDTH // 2 if REST else WIDTH), tl.float32)
    return first, tl.zeros((ROWS, REST if REST else 1), tl.float32)


@triton.jit
def in_eights(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of rows in eight parts: a thread adds what it has of a product, and asks no other thread."""
    return tl.sum(tl.reshape(x, (ROWS, COLUMNS // 8, 8)), 1)


@triton.jit
def store_parts(ptr, first, rest, start, stride, n, d, ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    """Write rows, which may be in parts, as rows start … of an (n, d) matrix whose rows are `stride` numbers apart."""
    if REST:
        store_rows(ptr, first, start, stride, n, d, 0, ROWS, WIDTH // 2)
        store_rows(ptr, rest, start, stride, n, d, WIDTH // 2, ROWS, REST)
    else:
        store_rows(ptr, first, start, stride, n, d, 0, ROWS, WIDTH)


@triton.jit
def store_rows(ptr, tile, start, stride, n, d, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write a tile from column `first` on into rows start … of an (n, d) matrix, in the matrix's dtype."""
    rows, dims = tl.arange(0, ROWS)[:, None], first + tl.arange(0, WIDTH)[None, :]
    pointers = ptr + tl.cast(start, tl.int64) * stride + (rows * stride + dims)
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=(rows < n - start) & (dims < d))


@triton.jit
def load_vector(ptr, start, n, other, LENGTH: tl.constexpr, CHECK: tl.constexpr):
    """Numbers start … start + LENGTH − 1 of a vector, `other` past its end.

    The start goes into the pointer, so that what is added to it is known when the kernel is compiled.
    """
    offsets = tl.arange(0, LENGTH)
    if CHECK:
        return tl.load(ptr + start + offsets, mask=offsets < n - start, other=other)
    return tl.load(ptr + start + offsets)


@triton.jit
def at_key(k_ptr, v_ptr, u_ptr, k_n, v_n, count, COPIES: tl.constexpr):
    """Pointers to keys, values and exposures moved on by `count` keys.

    Loops over whole tiles move them on in every turn: products with strides take 64 bits, and more operations.
    """
    count = tl.cast(count, tl.int64)
    return k_ptr + count * k_n, v_ptr + count * v_n, u_ptr + count * (2 if COPIES else 1)


@triton.jit
def load_exposures(ptr, start, n, LENGTH: tl.constexpr, CHECK: tl.constexpr, COPIES: tl.constexpr):
    """u and u·j of keys start … start + LENGTH − 1, zero past the end; j as :func:`anchor_of` counts it in index order.

    With COPIES they lie side by side as `_exposures_kernel` writes them. Each is fetched so many times, by as many
    threads as there are: left alone, the compiler lets each thread fetch all that its columns need.
    """
    if COPIES == 0:
        u = load_vector(ptr, start, n, 0.0, LENGTH, CHECK)
        return u, u * tl.arange(0, LENGTH).to(tl.float32)
    else:  # noqa: RET505
        keys, which = tl.arange(0, LENGTH)[None, :, None], tl.arange(0, 2)[None, None, :]
        pointers = ptr + tl.cast(start, tl.int64) * 2 + (keys * 2 + which + tl.zeros((COPIES, 1, 1), tl.int32))
        both = tl.load(pointers, mask=keys < n - start, other=0.0) if CHECK else tl.load(pointers)
        if COPIES == 2:
            both, _ = tl.split(tl.trans(both, 1, 2, 0))
        return tl.split(tl.reshape(both, (LENGTH, 2)))


@triton.jit
def load_numbers(ptr, start, n, ROWS: tl.constexpr, CHECK: tl.constexpr):
    """c, c·(i mod tile), lse and delta of queries start … start + ROWS − 1, zero past the end.

    The four lie side by side, (N, 4), so that one access takes all that a query has.
    """
    rows, which = tl.arange(0, ROWS)[:, None], tl.arange(0, 4)[None, :]
    pointers = ptr + tl.cast(start, tl.int64) * 4 + (rows * 4 + which)
    four = tl.load(pointers, mask=rows < n - start, other=0.0) if CHECK else tl.load(pointers)
    even, odd = tl.split(tl.reshape(four, (ROWS, 2, 2)))
    c, lse = tl.split(even)
    local, delta = tl.split(odd)
    return c, local, lse, delta


@triton.jit
def visible(
    earlier, offs_i, offs_j, n_q, n_k, q_doc, k_doc, mask_ptr, mask_m, mask_n,
    CAUSAL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Which pairs of the tile may be used; what is the query's comes as (M, 1) and the key's as (1, N), or turned.

    earlier: the pairs whose key is not later than their query.
    """
    inside = (offs_i < n_q) & (offs_j < n_k)
    pairs = inside
    if CAUSAL:
        pairs = pairs & earlier
    if HAS_DOCUMENTS:
        pairs = pairs & (q_doc == k_doc)
    if HAS_MASK:
        pointers = mask_ptr + offs_i.to(tl.int64) * mask_m + offs_j.to(tl.int64) * mask_n
        pairs = pairs & (tl.load(pointers, mask=inside, other=0) != 0)
    return pairs


@triton.jit
def visible_keys(
    start_m, n_q, n_k,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What queries from `start_m` on see: query 0's position, the end of their keys, and before which key all pairs.

    Tiles before that key need no look at single pairs.
    """
    first, stop, whole = n_k - n_q, n_k, 0
    if not HAS_POSITIONS and CAUSAL:
        stop = tl.minimum(n_k, first + start_m + BLOCK_M)
    if not HAS_POSITIONS and not HAS_DOCUMENTS and not HAS_MASK:
        # Something stays behind it to judge others by: under causality every query's own key, else the last tile.
        whole = n_k - 1
        if CAUSAL:
            whole = first + start_m
        whole = (whole // BLOCK_N) * BLOCK_N
    return first, stop, whole


@triton.jit
def visible_queries(
    start_n, n_q, n_k,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Who sees the keys from `start_n` on: query 0's position, the first query, and from which query on all pairs."""
    first, begin, whole = n_k - n_q, 0, n_q
    if not HAS_POSITIONS and CAUSAL:
        begin = (tl.maximum(start_n - first, 0) // BLOCK_M) * BLOCK_M
    if not HAS_POSITIONS and not HAS_DOCUMENTS and not HAS_MASK:
        whole = 0
        if CAUSAL:
            whole = tile_from(start_n + BLOCK_N, first, n_q, BLOCK_M)
    return first, begin, whole


@triton.jit
def tile_from(position, first, n_q, BLOCK_M: tl.constexpr):
    """The first query of the first tile of queries that are all at `position` or later; n_q if there is none."""
    return tl.minimum(n_q, tl.cdiv(tl.maximum(position - first, 0), BLOCK_M) * BLOCK_M)


@triton.jit
def document_of(ptr, offsets, n, other, HAS_DOCUMENTS: tl.constexpr):
    """Document ids of tokens `offsets`, `other` past the end; anything where there are no documents."""
    return tl.load(ptr + offsets, mask=offsets < n, other=other) if HAS_DOCUMENTS else offsets


@triton.jit
def nearest(position, BLOCK_N: tl.constexpr):
    """The first tile of keys that ends less than a tile's length before `position`: from it on all are taken in."""
    return tl.maximum(position + 1 - BLOCK_N, 0) // BLOCK_N


@triton.jit
def needed(reach, c, low, k_reach, u_least, distance):
    """1 where a key tile may matter to a query: its best possible logit against what the query has attended to so far.

    reach: scale·‖q‖ (≥ 0); k_reach: the largest ‖k‖ of the tile; u_least: its smallest exposure; distance: to the
    tile's last key; low: what the forward pass found that this query can spare. The proof: `docs/results/proofs.md`.
    A bound that is not a number shows nothing, so such a tile is kept.
    """
    return tl.where(reach * k_reach - c * u_least * distance <= low, 0, 1)


@triton.jit
def needed_by_rows(base, first, offs_m, reach, c, low, k_reach_ptr, u_least_ptr, BLOCK_N: tl.constexpr):
    """Which of GROUP key tiles from tile `base` on a query of the row tile needs, as bits; none of those before 0."""
    tiles = base + tl.arange(0, GROUP)
    k_reach = tl.load(k_reach_ptr + tiles, mask=tiles >= 0, other=0.0)
    u_least = tl.load(u_least_ptr + tiles, mask=tiles >= 0, other=0.0)
    distance = (first + offs_m[:, None] - (tiles * BLOCK_N + BLOCK_N - 1)[None, :]).to(tl.float32)
    keep = needed(reach[:, None], c[:, None], low[:, None], k_reach[None, :], u_least[None, :], distance)
    return bits_of((tl.max(keep, 0) > 0) & (tiles >= 0))


@triton.jit
def needed_by_columns(
    start, tile, first, n_q, reach_ptr, c_ptr, low_ptr, earliest_ptr, k_reach, u_least,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Which of GROUP tiles of queries from `start` on need the keys of tile `tile`, as bits."""
    blocks = start // BLOCK_M + tl.arange(0, GROUP)
    earliest = tl.load(earliest_ptr + blocks, mask=blocks < tl.cdiv(n_q, BLOCK_M), other=tile + 1)
    bits = tl.full((), 0, tl.uint32)
    # Where no row of tiles comes as far as this one, none has to be judged.
    if tl.min(earliest, 0) <= tile:
        rows = start + tl.arange(0, GROUP)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        reach = tl.load(reach_ptr + rows, mask=rows < n_q, other=0.0)
        low = tl.load(low_ptr + rows, mask=rows < n_q, other=float("inf"))
        c = tl.load(c_ptr + rows, mask=rows < n_q, other=0.0)
        distance = (first + rows - (tile * BLOCK_N + BLOCK_N - 1)).to(tl.float32)
        # A bound that is not a number would keep tiles of rows past the end.
        keep = needed(reach, c, low, k_reach, u_least, distance)
        bits = bits_of(tl.max(tl.where(rows < n_q, keep, 0), 1) > 0)
    return bits


@triton.jit
def bits_of(which):
    """The answers for a group of tiles as the bits of one number, the first as the lowest."""
    places = tl.arange(0, GROUP).to(tl.uint32)
    return same_in_all(tl.sum(tl.where(which, tl.full((GROUP,), 1, tl.uint32) << places, 0), 0).to(tl.uint32))


@triton.jit
def same_in_all(x):
    """The number x: as the largest of a warp's 32, which the compiler knows to be the same in all threads.

    Loops that end at such a number need no look at each thread, and addresses in them are counted once for all.
    """
    return tl.max(tl.zeros((32,), x.dtype) + x, 0)


@triton.jit
def place_of(bits):
    """Where the lowest bit is that is set: the exponent of it alone. 32 where none is."""
    lowest = (bits & (~bits + 1)).to(tl.float32)
    return tl.where(bits == 0, 32, (lowest.to(tl.int32, bitcast=True) >> 23) - 127)


@triton.jit
def run_of(bits):
    """The lowest run of bits that are set: where it begins, where it ends, and the bits without it."""
    # The sum carries through the run to the place after it.
    carried = bits + (bits & (~bits + 1))
    return place_of(bits), place_of(carried), bits & carried


#: What a norm in float32 may have been rounded down by.
SLACK = 1 + 2**-16


@triton.jit
def stretched(x_ptr, x_b, x_h, x_n, x_d, row, heads, tokens, n, width, stretch, BLOCK_D: tl.constexpr):
    """Euclidean norms (T,) of rows of x (B, H, N, D), times `stretch`; zero beyond the last token."""
    d = tl.arange(0, BLOCK_D)[None, :]
    x_ptr += (row // heads).to(tl.int64) * x_b + (row % heads).to(tl.int64) * x_h
    pointers = tokens[:, None].to(tl.int64) * x_n + d.to(tl.int64) * x_d
    x = tl.load(x_ptr + pointers, mask=(tokens[:, None] < n) & (d < width), other=0.0).to(tl.float32)
    return tl.sqrt(tl.sum(x * x, 1)) * tl.cast(stretch, tl.float32)


@triton.jit
def _query_norms_kernel(
    q_ptr, reach_ptr, q_b, q_h, q_n, q_d, heads, n, width, stretch, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """q (B, H, N, D) → each row's norm, stretched, (B, H, N)."""
    row = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = stretched(q_ptr, q_b, q_h, q_n, q_d, row, heads, tokens, n, width, stretch, BLOCK_D)
    tl.store(reach_ptr + row.to(tl.int64) * n + tokens, length, mask=tokens < n)


@triton.jit
def _key_bounds_kernel(
    k_ptr, u_ptr, reach_ptr, least_ptr, k_b, k_h, k_n, k_d, heads, n, width, stretch,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """k (B, H, N, D) and u (B, H, N) → of each BLOCK keys the largest norm, stretched, and the least u."""
    row = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = stretched(k_ptr, k_b, k_h, k_n, k_d, row, heads, tokens, n, width, stretch, BLOCK_D)
    u = tl.load(u_ptr + row.to(tl.int64) * n + tokens, mask=tokens < n, other=1.0)
    # Extremes would lose what is not a number, and a key that holds it must keep its tile.
    length = tl.where(length >= 0, length, float("inf"))
    u = tl.where(u >= 0, u, float("-inf"))
    at = row.to(tl.int64) * tl.cdiv(n, BLOCK) + tl.program_id(0)
    tl.store(reach_ptr + at, tl.max(length, 0))
    tl.store(least_ptr + at, tl.min(u, 0))


@triton.jit
def _exposures_kernel(u_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """u (rows, n) → (rows, n, 2): u and u·(j mod SPAN)."""
    start = tl.program_id(0) * BLOCK
    row = tl.program_id(1).to(tl.int64) * n + start
    keys, which = tl.arange(0, BLOCK)[:, None], tl.arange(0, 2)[None, :]
    u = tl.load(u_ptr + row + keys, mask=keys < n - start, other=0.0)
    both = tl.where(which == 0, u, u * ((start + keys) % SPAN).to(tl.float32))
    tl.store(out_ptr + row * 2 + (keys * 2 + which), both, mask=keys < n - start)


def with_places(u: Tensor) -> Tensor:
    """Exposures (B, H, N) and what they are times local positions, as kernels of queries read them: (B, H, N, 2)."""
    out = torch.empty(*u.shape, 2, dtype=torch.float32, device=u.device)
    grid = (-(-u.size(2) // 512), u.size(0) * u.size(1))
    traceable(_exposures_kernel)[grid](u.contiguous(), out, u.size(2), BLOCK=512, num_warps=4)
    return out


def bounds(q: Tensor, k: Tensor, v: Tensor, u: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """How far a query's products reach, (B, Hq, Nq), and of each tile of keys the largest norm and least exposure.

    Args:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D) and (B, Hk, Nk, Dv), any strides.
        u: exposures (B, Hk, Nk) in float32.
        scale: the softmax scale, which with log₂e is on the query's side.

    Returns:
        Three float32 tensors, the last two (B, Hk, tiles).
    """
    tile = tiles_for(q, v, "fwd", skip=True)
    sizes = {"BLOCK": tile["BLOCK_N"], "BLOCK_D": tile["BLOCK_D"]}
    blocks = [-(-x.size(2) // sizes["BLOCK"]) for x in (q, k)]
    reach = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    k_reach, u_least = (
        torch.empty(*k.shape[:2], blocks[1], dtype=torch.float32, device=q.device) for _ in ("norms", "exposures")
    )
    traceable(_query_norms_kernel)[(blocks[0], q.size(0) * q.size(1))](
        q, reach, *q.stride(), q.size(1), q.size(2), q.size(3), scale * LOG2E * SLACK, **sizes, num_warps=4
    )
    traceable(_key_bounds_kernel)[(blocks[1], k.size(0) * k.size(1))](
        k, u.contiguous(), k_reach, u_least, *k.stride(), k.size(1), k.size(2), k.size(3), SLACK, **sizes, num_warps=4
    )
    return reach, k_reach, u_least
