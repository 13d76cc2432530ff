"""The decode kernel for one query per key head, which leaves values unread that have no weight.

With one row there is nothing for the matrix units to do: products are plain sums in float32. Each place of a tile, one
of BLOCK_N, keeps a softmax of its own over the keys that come by it; the places are merged once, at the end. Four tiles
of keys are under way at a time, each in registers of its own that are asked for anew right after their last use, so
that nothing waits for what is under way. Values are asked for when their weights are known and used one tile later.

Two numbers in half precision lie in an int32. As single numbers they would be unpacked as soon as they arrive, which is
to wait for them; as a pair they are left alone until they are used.

**What is left unread.** A program looks at the first tile of its own keys and at the newest keys of all, and finds the
largest logit m in both. It reads the value of key j only if its base-2 logit s_j > m − 40; the weight counts in the
log-sum-exp in any case. Each key left unread has at most 2⁻⁴⁰ of the attention that the query pays to the key of m,
which is at most 1. That m may be exceeded elsewhere does no harm: the share of that one key is a share of the whole
sum, whatever else is in it. So a query loses at most Nk·2⁻⁴⁰ of its attention. What is lost is not shared out among the
others: an output coordinate is off by at most Nk·2⁻⁴⁰·max|v|, at 65,536 keys by 2⁻²⁴·max|v|, half a unit of float32.
The log-sum-exp is that of all keys.

Where |m| > 4·10⁷, float32 has no room for 40 below it: the limit is then 2⁻²⁰·|m| below m. One that rounds to m itself
would leave m's own value unread.

A logit that is not a number makes its weight, the sum and the output not a number: a broken key or landmark shows,
however far it is. A broken value shows where it is read; one that is left unread has no say, like values past the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gape.ops.triton.decode_kernels import last_to_finish, merge_row
from gape.ops.triton.tiles import LOWEST, single

#: A value is read if its key weighs more than 2 to minus this many times a key that was seen before.
BITS = tl.constexpr(40.0)

#: The least distance of that limit from a logit, as a share of it: some steps of float32.
STEPS = tl.constexpr(2.0**-20)

#: Tiles of keys that are under way at a time; the kernel spells out a turn for each.
TILES_UNDER_WAY = 4
TILES = tl.constexpr(TILES_UNDER_WAY)

#: Elements in half precision of the 16 bytes that one access takes, and pairs of them.
PIECE = 8
PIECE_PAIRS = tl.constexpr(4)


@triton.jit
def halves(pairs, BF16: tl.constexpr):
    """First and second numbers of pairs in half precision that lie in an int32, as float32."""
    if BF16:
        # A bfloat16 is the upper half of a float32.
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    first = (pairs & 65535).to(tl.int16).to(tl.float16, bitcast=True)
    second = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def as_pairs(ptr, pieces):
    """Where the pairs of a head begin, so many pieces of 16 bytes on: whole pieces can be read from there."""
    return ptr.to(tl.pointer_type(tl.int32), bitcast=True) + pieces * PIECE_PAIRS


@triton.jit
def share_of(length, split, splits, STEP: tl.constexpr):
    """The keys of a program, from the first to before the last; whole steps but for the last of all."""
    steps = tl.cdiv(tl.maximum(length, 0), STEP)
    each, over = steps // splits, steps % splits
    first = split * each + tl.minimum(split, over)
    last = first + each + (split < over).to(tl.int32)
    return first * STEP, tl.minimum(last * STEP, length)


@triton.jit
def keys_of(
    k_ptr, mark_ptr, mark_n, left,
    TILE: tl.constexpr, GATED: tl.constexpr, K_ROW: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Keys (BLOCK_N, PAIRS) and landmarks of a tile, zero from key `left` on; anything for landmarks without gates."""
    rows = TILE * BLOCK_N + tl.arange(0, BLOCK_N)
    there = rows < left
    where = k_ptr + rows[:, None] * K_ROW + tl.arange(0, PAIRS)[None, :]
    k = tl.load(where, mask=there[:, None], other=0)
    return k, tl.load(mark_ptr + rows * mark_n, mask=there, other=0.0) if GATED else 0.0


@triton.jit
def logits(
    k, mark, q_first, q_second, c, far, left,
    TILE: tl.constexpr, GATED: tl.constexpr, BF16: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Base-2 logits of a tile, −inf from key `left` on; `far`: distances to the keys of tile 0."""
    first, second = halves(k, BF16)
    s = tl.sum(first * q_first[None, :] + second * q_second[None, :], 1)
    if GATED:
        s -= c * ((1.0 - mark) * (far - TILE * BLOCK_N))
    return tl.where(tl.arange(0, BLOCK_N) < left - TILE * BLOCK_N, s, float("-inf"))


@triton.jit
def limit_of(s):
    """What a logit has to exceed for its value to be read, from logits of the same query."""
    top = tl.max(s, 0)
    return top - tl.maximum(BITS, tl.abs(top) * STEPS)


@triton.jit
def with_values(acc_first, acc_second, v, p, fade, BF16: tl.constexpr):
    """The sums of weighted values with those of one more tile."""
    first, second = halves(v, BF16)
    return acc_first * fade[:, None] + p[:, None] * first, acc_second * fade[:, None] + p[:, None] * second


@triton.jit
def turn(
    k, mark, v, p, fade, top, total, acc_first, acc_second,
    k_ptr, v_ptr, mark_ptr, mark_n, q_first, q_second, c, far, least, left, step,
    TILE: tl.constexpr, GATED: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, BF16: tl.constexpr,
    BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Weigh a tile, ask for the one `step` keys on and for the values of this one, and use those asked for before.

    Returns what comes in first, as it stands afterwards.
    """
    s = logits(k, mark, q_first, q_second, c, far, left, TILE, GATED, BF16, BLOCK_N)
    k, mark = keys_of(k_ptr, mark_ptr, mark_n, left - step, TILE, GATED, K_ROW, BLOCK_N, PAIRS)
    acc_first, acc_second = with_values(acc_first, acc_second, v, p, fade, BF16)
    where = v_ptr + (TILE * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * V_ROW + tl.arange(0, PAIRS)[None, :]
    v = tl.load(where, mask=(s > least)[:, None], other=0)
    higher = tl.maximum(top, s)
    p, fade = tl.exp2(s - higher), tl.exp2(top - higher)
    return k, mark, v, p, fade, higher, total * fade + p, acc_first, acc_second


@triton.jit
def leave(part_ptr, lse_ptr, place, top, total, acc_first, acc_second, BLOCK_D: tl.constexpr):
    """Write what the places found together: a normalised part and its log-sum-exp, zeros and −inf without keys."""
    highest = tl.max(top, 0)
    weight = tl.exp2(top - highest)
    mass = tl.sum(total * weight, 0)
    empty = mass == 0.0
    safe = tl.where(empty, 1.0, mass)
    tl.store(lse_ptr + place, tl.where(empty, float("-inf"), highest + tl.log2(safe)))
    where = part_ptr + place * BLOCK_D + 2 * tl.arange(0, BLOCK_D // 2)
    tl.store(where, tl.sum(acc_first * weight[:, None], 0) / safe)
    tl.store(where + 1, tl.sum(acc_second * weight[:, None], 0) / safe)


@triton.jit
def pairs_of(ptr, stride, PAIRS: tl.constexpr):
    """First and second numbers of the pairs of a single row, float32."""
    ptr += 2 * tl.arange(0, PAIRS) * stride
    return tl.load(ptr).to(tl.float32), tl.load(ptr + stride).to(tl.float32)


@triton.jit
def attend_to_share(
    part_ptr, lse_ptr, place, k_ptr, v_ptr, mark_ptr, mark_n, q_ptr, q_d, gate_ptr, amplitude_ptr, scale, rate_unit,
    length, split, splits, new_k_ptr, new_v_ptr,
    GATED: tl.constexpr, NEW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, BF16: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Leave at `place` what a query finds in one of `splits` shares of `length` keys, which lie in pairs from k_ptr on.

    Under NEW there is one more key, which does not lie with them; the first share has it. Not together with GATED.
    """
    PAIRS: tl.constexpr = BLOCK_D // 2
    STEP: tl.constexpr = BLOCK_N * TILES
    low, high = share_of(length, split, splits, STEP)
    newest = tl.maximum(length - BLOCK_N, 0)
    new_k, new_mark = keys_of(
        k_ptr + newest.to(tl.int64) * K_ROW, mark_ptr + newest.to(tl.int64) * mark_n, mark_n, length - newest,
        0, GATED, K_ROW, BLOCK_N, PAIRS,
    )  # fmt: skip
    k_ptr += low.to(tl.int64) * K_ROW
    v_ptr += low.to(tl.int64) * V_ROW
    mark_ptr += low.to(tl.int64) * mark_n
    left = high - low
    k0, mark0 = keys_of(k_ptr, mark_ptr, mark_n, left, 0, GATED, K_ROW, BLOCK_N, PAIRS)
    k1, mark1 = keys_of(k_ptr, mark_ptr, mark_n, left, 1, GATED, K_ROW, BLOCK_N, PAIRS)
    k2, mark2 = keys_of(k_ptr, mark_ptr, mark_n, left, 2, GATED, K_ROW, BLOCK_N, PAIRS)
    k3, mark3 = keys_of(k_ptr, mark_ptr, mark_n, left, 3, GATED, K_ROW, BLOCK_N, PAIRS)

    q_first, q_second = pairs_of(q_ptr, q_d, PAIRS)
    q_first, q_second = q_first * scale, q_second * scale
    c = 0.0
    if GATED:
        c = tl.load(gate_ptr) * tl.load(amplitude_ptr) * rate_unit
    # Distances are integers before they are floats; the query is the last of the keys.
    far = (length - 1 - low - tl.arange(0, BLOCK_N)).to(tl.float32)
    near = (length - 1 - newest - tl.arange(0, BLOCK_N)).to(tl.float32)
    newest_logits = logits(new_k, new_mark, q_first, q_second, c, near, length - newest, 0, GATED, BF16, BLOCK_N)
    first_logits = logits(k0, mark0, q_first, q_second, c, far, left, 0, GATED, BF16, BLOCK_N)
    seen = tl.maximum(first_logits, newest_logits)
    top = tl.full((BLOCK_N,), LOWEST, tl.float32)
    total, p = tl.zeros((BLOCK_N,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    fade = tl.full((BLOCK_N,), 1.0, tl.float32)
    v = tl.zeros((BLOCK_N, PAIRS), tl.int32)
    acc_first, acc_second = tl.zeros((BLOCK_N, PAIRS), tl.float32), tl.zeros((BLOCK_N, PAIRS), tl.float32)
    if NEW:
        # What the first place begins with.
        first, second = pairs_of(new_k_ptr, 1, PAIRS)
        s = tl.sum(first * q_first + second * q_second, 0)
        seen = tl.maximum(seen, s)
        here = (tl.arange(0, BLOCK_N) == 0) & (split == 0)
        # −inf would be subtracted from itself. What is not a number stays so.
        top, total = tl.where(here, tl.where(s < LOWEST, LOWEST, s), top), tl.where(here, 1.0, total)
        first, second = pairs_of(new_v_ptr, 1, PAIRS)
        acc_first = tl.where(here[:, None], first[None, :], acc_first)
        acc_second = tl.where(here[:, None], second[None, :], acc_second)
    least = limit_of(seen)
    for start in range(low, high, STEP):
        left = high - start
        far = (length - 1 - start - tl.arange(0, BLOCK_N)).to(tl.float32)
        k_ptr += STEP * K_ROW
        mark_ptr += STEP * mark_n
        k0, mark0, v, p, fade, top, total, acc_first, acc_second = turn(
            k0, mark0, v, p, fade, top, total, acc_first, acc_second, k_ptr, v_ptr, mark_ptr, mark_n,
            q_first, q_second, c, far, least, left, STEP, 0, GATED, K_ROW, V_ROW, BF16, BLOCK_N, PAIRS,
        )  # fmt: skip
        k1, mark1, v, p, fade, top, total, acc_first, acc_second = turn(
            k1, mark1, v, p, fade, top, total, acc_first, acc_second, k_ptr, v_ptr, mark_ptr, mark_n,
            q_first, q_second, c, far, least, left, STEP, 1, GATED, K_ROW, V_ROW, BF16, BLOCK_N, PAIRS,
        )  # fmt: skip
        k2, mark2, v, p, fade, top, total, acc_first, acc_second = turn(
            k2, mark2, v, p, fade, top, total, acc_first, acc_second, k_ptr, v_ptr, mark_ptr, mark_n,
            q_first, q_second, c, far, least, left, STEP, 2, GATED, K_ROW, V_ROW, BF16, BLOCK_N, PAIRS,
        )  # fmt: skip
        k3, mark3, v, p, fade, top, total, acc_first, acc_second = turn(
            k3, mark3, v, p, fade, top, total, acc_first, acc_second, k_ptr, v_ptr, mark_ptr, mark_n,
            q_first, q_second, c, far, least, left, STEP, 3, GATED, K_ROW, V_ROW, BF16, BLOCK_N, PAIRS,
        )  # fmt: skip
        v_ptr += STEP * V_ROW
    acc_first, acc_second = with_values(acc_first, acc_second, v, p, fade, BF16)
    leave(part_ptr, lse_ptr, place, top, total, acc_first, acc_second, BLOCK_D)


# The cache grows by a token each step: a kernel must not be compiled anew for every length.
@triton.jit(do_not_specialize=("n_k", "k_b", "k_h", "v_b", "v_h", "mark_b", "mark_h"))
def partial_lone(
    part_ptr, lse_ptr, ticket_ptr, out_ptr, whole_lse_ptr, n_heads, n_k, scale, rate_unit, unit,
    q_ptr, k_ptr, v_ptr, gate_ptr, mark_ptr, amplitude_ptr, lengths_ptr,
    q_b, q_h, q_d, k_b, k_h, v_b, v_h, gate_b, gate_h, mark_b, mark_h, mark_n, amp_h,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, GATED: tl.constexpr, HAS_LENGTHS: tl.constexpr, MERGE: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Partial outputs (B·H, splits, D) and base-2 log-sum-exps (B·H, splits), float32, contiguous; MERGE as elsewhere.

    k and v are in half precision with rows of neighbours; k_b … v_h are in pieces of 16 bytes, K_ROW and V_ROW, from
    one key to the next, in pairs. Without GATED there is no bias.
    """
    scale, rate_unit, unit = single(scale), single(rate_unit), single(unit)
    row, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    batch, head = (tl.program_id(1) // n_heads).to(tl.int64), (tl.program_id(1) % n_heads).to(tl.int64)
    BF16: tl.constexpr = k_ptr.dtype.element_ty == tl.bfloat16
    length = n_k
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(lengths_ptr + batch), n_k).to(tl.int32)
    attend_to_share(
        part_ptr, lse_ptr, row * splits + split,
        as_pairs(k_ptr, batch * k_b + head * k_h), as_pairs(v_ptr, batch * v_b + head * v_h),
        mark_ptr + batch * mark_b + head * mark_h, mark_n, q_ptr + batch * q_b + head * q_h, q_d,
        gate_ptr + batch * gate_b + head * gate_h, amplitude_ptr + head * amp_h, scale, rate_unit,
        length, split, splits, q_ptr, q_ptr, GATED, False, K_ROW, V_ROW, BF16, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    # Two questions: with one, the second would be compiled where the first says no.
    if MERGE:  # noqa: SIM102
        if last_to_finish(ticket_ptr + row, splits):
            merge_row(
                part_ptr, lse_ptr, out_ptr, whole_lse_ptr, row, row * splits, splits, BLOCK_D, unit, PARTS, BLOCK_D
            )  # fmt: skip
