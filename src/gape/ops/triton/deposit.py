"""A token's keys and values to the buffers of their heads, in one launch, wherever those lie.

Key heads of a layer have buffers with room of their own, somewhere in memory; a table on the device says where, by
offsets from the first head's. One program has one key head of one sample: it writes the key, the value and, for a cache
that measures queries, the content of the key and of its queries beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.triton.custom_ops import INTERPRETED, direct
from gape.ops.triton.decode_plan import power_of_two
from gape.utils.validation import invalid_argument

#: Numbers that the table has of a head: where keys and values begin, from sample to sample, and room.
COLUMNS = tl.constexpr(5)


# Rows come from projections and counters lie side by side: where any begins must not make another kernel.
@triton.jit(
    do_not_specialize=("room", "q_b", "q_h", "k_b", "k_h", "v_b", "v_h"),
    do_not_specialize_on_alignment=(
        "kept_k_ptr", "kept_v_ptr", "noted_q_ptr", "noted_k_ptr", "q_ptr", "k_ptr", "v_ptr", "columns_ptr", "noted_ptr",
    ),
)  # fmt: skip
def write_token(
    kept_k_ptr, kept_v_ptr, noted_q_ptr, noted_k_ptr, q_ptr, k_ptr, v_ptr, columns_ptr, noted_ptr, heads_ptr,
    room, q_b, q_h, k_b, k_h, v_b, v_h,
    GROUPS: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, CONTENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """q (B, Hk · GROUPS, K_WIDTH), k (B, Hk, K_WIDTH) and v (B, Hk, V_WIDTH), rows of neighbours, one program for each
    sample and key head.

    kept_k, kept_v: the buffers that offsets are counted from. columns: int64 (Hk,), where a head's new key goes. heads:
    int64 (Hk, COLUMNS). noted_q, noted_k: (B, heads, room, CONTENT), contiguous, with the column `noted`; without them
    CONTENT is 0.
    """
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    table = heads_ptr + head * COLUMNS
    column = tl.load(columns_ptr + head)
    # A buffer that is full keeps what it has: behind it lies something else.
    fits = column < tl.load(table + 4)
    k = tl.load(k_ptr + batch * k_b + head * k_h + dims, mask=dims < K_WIDTH)
    v = tl.load(v_ptr + batch * v_b + head * v_h + dims, mask=dims < V_WIDTH)
    kept_k_ptr += tl.load(table) + batch * tl.load(table + 2) + column * K_WIDTH
    kept_v_ptr += tl.load(table + 1) + batch * tl.load(table + 3) + column * V_WIDTH
    tl.store(kept_k_ptr + dims, k, mask=dims < tl.where(fits, K_WIDTH, 0))
    tl.store(kept_v_ptr + dims, v, mask=dims < tl.where(fits, V_WIDTH, 0))
    if CONTENT:
        noted, row = tl.load(noted_ptr), batch * tl.num_programs(1) + head
        content = dims < CONTENT
        tl.store(noted_k_ptr + (row * room + noted) * CONTENT + dims, k, mask=content)
        for each in tl.static_range(GROUPS):
            q = tl.load(q_ptr + batch * q_b + (head * GROUPS + each) * q_h + dims, mask=content)
            tl.store(noted_q_ptr + ((row * GROUPS + each) * room + noted) * CONTENT + dims, q, mask=content)


def deposits(device: torch.device) -> bool:
    """Whether the kernel runs on a device."""
    return device.type == "cuda" or INTERPRETED


class Deposit:
    """The buffers of a layer's key heads, as a kernel finds them to write a token.

    Made once for buffers that stay where they are; they have to outlive it. Not for a compiler: it may hand a copy of
    the first buffer to the kernel, and others are counted from there.

    Args:
        keys, values: (B, room, D) and (B, room, Dv) for each key head, rows that follow one another; rooms may differ.
        notes: queries and keys to be measured, (B, Hq, n, d) and (B, Hk, n, d), contiguous: the first d of their D
            coordinates; or None.

    Raises:
        ValueError: buffers that are not like each other, or not such rows; names the argument.
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], notes: tuple[Tensor, Tensor] | None = None
    ) -> None:
        for name, buffers in (("keys", keys), ("values", values)):
            if not buffers or len(buffers) != len(keys):
                raise invalid_argument(name, len(buffers), "one buffer for each key head")
            if not all(_in_rows(x, buffers[0]) and _alike(x, keys[0]) for x in buffers):
                raise invalid_argument(
                    name, buffers[0], "buffers (B, room, D) of one dtype, device and width, row after row"
                )
        if any(k.size(1) != v.size(1) for k, v in zip(keys, values, strict=True)):
            raise invalid_argument(
                "values", [v.size(1) for v in values], f"room for {[k.size(1) for k in keys]} columns"
            )
        self._k, self._v, self._notes = keys[0], values[0], notes
        if notes is not None:
            self._check_notes(*notes, len(keys))
        columns = (
            [_elements_between(self._k, k) for k in keys],
            [_elements_between(self._v, v) for v in values],
            [k.stride(0) for k in keys],
            [v.stride(0) for v in values],
            [k.size(1) for k in keys],
        )
        self._heads = torch.tensor(list(zip(*columns, strict=True)), dtype=torch.int64, device=self._k.device)

    def write(self, q: Tensor, k: Tensor, v: Tensor, columns: Tensor, noted: Tensor) -> None:
        """Write a token to every head.

        Args:
            q, k, v: (B, Hq, 1, D), (B, Hk, 1, D) and (B, Hk, 1, Dv); of q the notes alone are made.
            columns: int64 (Hk,), contiguous: where the token goes. A buffer that has no such column is left as it is.
            noted: int64 (1,), the column of the notes, which they have to have.

        Raises:
            ValueError: for an argument of wrong shape, dtype or device; it names the argument.
        """
        n_heads, batch = self._heads.size(0), self._k.size(0)
        groups = max(1, q.size(1) // n_heads)
        widths = {"q": (q, n_heads * groups, self._k), "k": (k, n_heads, self._k), "v": (v, n_heads, self._v)}
        for name, (x, heads, kept) in widths.items():
            shape = (batch, heads, 1, kept.size(2))
            if x.shape != shape or not _alike(x, kept):
                raise invalid_argument(name, x, f"{shape} in {kept.dtype} on {kept.device}")
        for name, numbers, count in (("columns", columns, n_heads), ("noted", noted, 1)):
            ours = numbers.dtype == torch.int64 and numbers.device == k.device and numbers.is_contiguous()
            if numbers.shape != (count,) or not ours:
                raise invalid_argument(name, numbers, f"int64 ({count},) on {k.device}, contiguous")
        # A pointer that is never followed stands in for notes that are not there.
        noted_q, noted_k = (q, k) if self._notes is None else self._notes
        if self._notes is not None and noted_q.size(1) != q.size(1):
            raise invalid_argument("q", q, f"{noted_q.size(1)} heads, as the notes have")
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        direct(write_token)[(batch, n_heads)](
            self._k, self._v, noted_q, noted_k, q, k, v, columns, noted, self._heads, noted_k.size(2),
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            GROUPS=groups, K_WIDTH=k.size(3), V_WIDTH=v.size(3),
            CONTENT=0 if self._notes is None else noted_k.size(3),
            BLOCK=power_of_two(max(k.size(3), v.size(3))), num_warps=4,
        )  # fmt: skip

    def _check_notes(self, q: Tensor, k: Tensor, n_heads: int) -> None:
        shape = (self._k.size(0), n_heads, k.size(2), k.size(3))
        if k.shape != shape or k.size(3) > self._k.size(2) or not (k.is_contiguous() and _alike(k, self._k)):
            raise invalid_argument("notes", k, f"keys ({shape[0]}, {n_heads}, n, up to {self._k.size(2)}), contiguous")
        grouped = q.size(1) > 0 and q.size(1) % n_heads == 0
        if not grouped or q.shape != (shape[0], q.size(1), *shape[2:]) or not (q.is_contiguous() and _alike(q, k)):
            raise invalid_argument(
                "notes", q, f"queries ({shape[0]}, a multiple of {n_heads}, {shape[2]}, {shape[3]}), contiguous"
            )


def _in_rows(x: Tensor, first: Tensor) -> bool:
    return (
        x.dim() == 3 and x.shape[::2] == first.shape[::2] and x.size(2) > 0 and x.stride()[1:] == (x.size(2), 1)
    )  # fmt: skip


def _alike(x: Tensor, other: Tensor) -> bool:
    return x.dtype == other.dtype and x.device == other.device


def _elements_between(one: Tensor, other: Tensor) -> int:
    """From the beginning of one buffer to that of another."""
    return (other.data_ptr() - one.data_ptr()) // one.element_size()
