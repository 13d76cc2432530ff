"""Attention over a paged KV cache: what a page holds, and how keys are written, read and attended to.

A page has room for 64 keys of one sequence, one key head of one row. Each key is stored as it enters the dot product,
with its value, its exposure u = 1 − landmark and its position. Queries come later than every cached key, so there is no
causality and no mask here: query i sees all keys of its sequence under the bias −c_i·u_j·(i − j). The tokens of a
prompt attend to each other first, :func:`causal_attention`, and both parts are merged.

Here stands the contract and an implementation in plain PyTorch for any device and dtype. Kernels of
:mod:`gape.ops.triton.paged` run on a GPU in half precision and float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gape.ops.inputs import INTEGERS, bias_dtype
from gape.ops.limits import HALVES, HAS_TRITON, TRITON_WIDTH, triton_cannot
from gape.utils.validation import invalid_argument, weight

#: Keys of a page.
PAGE = 64

#: Logits that the plain implementation makes at once.
_LOGITS = 2**26


class PageLayout(NamedTuple):
    """Where things lie in the bytes of one page: keys, values, exposures, positions.

    Attributes:
        key_width: coordinates of a stored key, a multiple of 8; narrower keys are followed by zeros.
        value_width: coordinates of a stored value, a multiple of 8.
        dtype: of keys and values.
    """

    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def side_dtype(self) -> torch.dtype:
        """Dtype of exposures: float32, or float64 beside float64."""
        return bias_dtype(self.dtype)

    @property
    def values_at(self) -> int:
        """Byte of the first value; keys begin at 0."""
        return PAGE * self.key_width * self.dtype.itemsize

    @property
    def exposures_at(self) -> int:
        """Byte of the first exposure."""
        return self.values_at + PAGE * self.value_width * self.dtype.itemsize

    @property
    def positions_at(self) -> int:
        """Byte of the first position, int32."""
        return self.exposures_at + PAGE * self.side_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of a page, a multiple of 16."""
        return self.positions_at + PAGE * torch.int32.itemsize


def page_layout(key_dim: int, value_dim: int, dtype: torch.dtype) -> PageLayout:
    """The layout for keys and values of these widths, each rounded up to a multiple of 8."""
    return PageLayout(-(-key_dim // 8) * 8, -(-value_dim // 8) * 8, dtype)


def runs_in_kernels(layout: PageLayout, device: torch.device) -> bool:
    """Whether kernels read and write pages of this layout on a device, and not PyTorch."""
    fits = max(layout.key_width, layout.value_width) <= TRITON_WIDTH
    return HAS_TRITON and device.type == "cuda" and layout.dtype in (*HALVES, torch.float32) and fits


class Pages(NamedTuple):
    """The cached keys of one layer: B rows, Hk key heads, up to W pages for each.

    Attributes:
        layout: of a page.
        slab: uint8 (P, layout.nbytes), all pages. Empty where they lie in several slabs, which only kernels read.
        addresses: int64 (B, Hk, W), where each page begins in the memory of its device, 0 where there is none.
        lengths: int32 (B, Hk), keys of each sequence.
        key_norm: float32 (B, Hk), no cached key of a sequence has a larger norm.
    """

    layout: PageLayout
    slab: Tensor
    addresses: Tensor
    lengths: Tensor
    key_norm: Tensor


class _Parts(NamedTuple):
    """Views of a slab: keys (P, PAGE, key_width), values (P, PAGE, value_width), exposures and positions (P, PAGE)."""

    keys: Tensor
    values: Tensor
    exposures: Tensor
    positions: Tensor


def paged_attention(
    q: Tensor, rate: Tensor, positions: Tensor, pages: Pages, *, scale: float, new: int = 0,
    prior: tuple[Tensor, Tensor] | None = None, eps: float = 0.0, tickets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of queries over all cached keys of their sequences, without gradients.

    Args:
        q: (B, Hq, n, D), rotated, in the dtype of the pages; D up to their key_width.
        rate: c_i of each query, (B, Hq, n) in float32 or float64.
        positions: of the queries, integer (n,) or (B, n); no cached key has a larger one.
        pages: the cached keys.
        scale: the softmax scale.
        new: keys behind `lengths` that count too: 1 where a token's own key is written and lengths follow later.
        prior: output (B, Hq, n, up to value_width) and natural log-sum-exp (B, Hq, n) of the same queries over other
            keys. They are merged in.
        eps: attention that a query may lose to pages that are not read, from 0 to below 1; only with `prior`.
        tickets: int32 zeros, which are zeros again afterwards and which no launch has that may run at the same time. A
            captured CUDA graph that owns B·Hk of them needs no second launch where few parts are merged. Only kernels
            read them.

    Returns:
        Output (B, Hq, n, value_width) in q's dtype and natural log-sum-exp (B, Hq, n) in float32 (float64 beside
        float64). A query without any key gets zeros and −inf.

    Raises:
        ValueError: tensors that do not fit together, or several slabs where no kernel runs; names the argument.
    """
    _check_queries(q, rate, positions, pages, prior, eps)
    if runs_in_kernels(pages.layout, pages.addresses.device):
        from gape.ops.triton import paged  # noqa: PLC0415

        return paged.paged_attention(
            q, rate, positions, pages, scale=scale, new=new, prior=prior, eps=eps, tickets=tickets
        )
    return plain_attention(q, rate, positions, pages, scale=scale, new=new, prior=prior)


def write_keys(
    pages: Pages, k: Tensor, v: Tensor, exposure: Tensor, positions: Tensor, slots: Tensor | None = None
) -> None:
    """Write keys to their pages. Lengths stay as they are, `key_norm` takes the new keys in.

    Args:
        pages: what is written to.
        k, v: (B, Hk, n, D) and (B, Hk, n, Dv), up to as wide as the pages; zeros follow.
        exposure: 1 − landmark, (B, Hk, n).
        positions: integer (n,), (B, n) or (B, Hk, n).
        slots: int32 (B, Hk, n), each key's place in its sequence; None: behind those that are there. Keys are left out
            whose place is negative or has no page.

    Raises:
        ValueError: tensors that do not fit together; names the argument.
    """
    _check_keys(pages, k, v, exposure, positions, slots)
    if runs_in_kernels(pages.layout, pages.addresses.device):
        from gape.ops.triton import paged  # noqa: PLC0415

        paged.write_keys(pages, k, v, exposure, positions, slots)
    else:
        plain_write(pages, k, v, exposure, positions, slots)


def read_keys(pages: Pages, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read cached keys.

    Args:
        pages: what is read.
        slots: int32 (B, Hk, m), places in the sequences. Where one is negative, or has no page, everything is zero.

    Returns:
        Keys (B, Hk, m, key_width), values (B, Hk, m, value_width), exposures (B, Hk, m) and positions int32 (B, Hk, m).

    Raises:
        ValueError: slots of another shape or dtype.
    """
    _check_slots(pages, slots, None)
    if runs_in_kernels(pages.layout, pages.addresses.device):
        from gape.ops.triton import paged  # noqa: PLC0415

        return paged.read_keys(pages, slots)
    return plain_read(pages, slots)


def causal_in_kernels(q: Tensor, v: Tensor) -> bool:
    """Whether :func:`causal_attention` runs in a kernel, and not in PyTorch."""
    return q.is_cuda and triton_cannot(q, v) is None


@torch.no_grad()
def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, exposure: Tensor, *, scale: float, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention of tokens in index order, each to itself and to those before it, without gradients.

    Args:
        q, k, v: (B, Hq, n, D), (B, Hk, n, D) and (B, Hk, n, Dv), rotated.
        rate: c_i of each query, (B, Hq, n) in float32 or float64.
        exposure: 1 − landmark, (B, Hk, n).
        scale: the softmax scale.
        eps: attention that a query may lose to tiles that are not read; only kernels skip.

    Returns:
        Output (B, Hq, n, Dv) in q's dtype and natural log-sum-exp (B, Hq, n) in float32 (float64 beside float64).
    """
    if causal_in_kernels(q, v):
        from gape.ops.triton.attention import causal_answer  # noqa: PLC0415

        return causal_answer(q, k, v, rate, exposure, scale=scale, eps=eps)
    dtype, n, groups = exposure.dtype, q.size(2), q.size(1) // k.size(1)
    k, v = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    exposure = exposure.repeat_interleave(groups, dim=1)
    places = torch.arange(n, device=q.device)
    at_once = max(1, _LOGITS // max(1, q.size(0) * q.size(1) * n))
    outs, lses = [], []
    for start in range(0, n, at_once):
        rows = slice(start, start + at_once)
        distance = places[rows, None] - places
        logits = scale * (q[:, :, rows].to(dtype) @ k.mT)
        logits = logits - rate[:, :, rows, None].to(dtype) * exposure.unsqueeze(2) * distance
        logits = logits.masked_fill(distance < 0, -torch.inf)
        lses.append(logits.logsumexp(-1))
        outs.append(logits.softmax(-1) @ v)
    return torch.cat(outs, dim=2).to(q.dtype), torch.cat(lses, dim=2)


@torch.no_grad()
def plain_attention(
    q: Tensor, rate: Tensor, positions: Tensor, pages: Pages, *, scale: float, new: int = 0,
    prior: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`paged_attention` in PyTorch, on any device and in any dtype; reads all pages."""
    lengths = (pages.lengths + new).clamp(max=pages.addresses.size(-1) * PAGE)
    slots = torch.arange(int(lengths.max()) if lengths.numel() else 0, dtype=torch.int32, device=q.device)
    valid = slots < lengths.unsqueeze(-1)
    k, v, u, j = plain_read(pages, torch.where(valid, slots, -1))
    positions = positions.expand(q.size(0), q.size(2))
    at_once = max(1, _LOGITS // max(1, q.size(0) * q.size(1) * slots.numel()))
    parts = [
        _dense(q[:, :, some], rate[:, :, some], positions[:, some], (k, v, u, j), valid, scale)
        for some in (slice(start, start + at_once) for start in range(0, max(1, q.size(2)), at_once))
    ]
    out, lse = torch.cat([part[0] for part in parts], dim=2), torch.cat([part[1] for part in parts], dim=2)
    if prior is not None:
        out, lse = merge(out, lse, *prior)
    return out.to(q.dtype), lse


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: outputs (…, Dv) and natural log-sum-exps (…).

    A narrower output is followed by zeros. A row without keys in both gets zeros and −inf.
    """
    other = torch.nn.functional.pad(other.to(out.dtype), (0, out.size(-1) - other.size(-1)))
    other_lse = other_lse.to(lse.dtype)
    total = torch.logaddexp(lse, other_lse)
    level = total.masked_fill(total == -torch.inf, 0.0)
    ours, theirs = (torch.exp(each - level).unsqueeze(-1) for each in (lse, other_lse))
    return out * ours + other * theirs, total


@torch.no_grad()
def plain_write(
    pages: Pages, k: Tensor, v: Tensor, exposure: Tensor, positions: Tensor, slots: Tensor | None = None
) -> None:
    """:func:`write_keys` in PyTorch."""
    batch, heads, n, width = k.shape
    if slots is None:
        slots = pages.lengths.unsqueeze(-1) + torch.arange(n, dtype=torch.int32, device=k.device)
    parts, (numbers, valid) = _parts(pages), _numbers(pages, slots)
    page, place = numbers[valid], slots[valid].long() % PAGE
    keys = k.to(pages.layout.dtype)
    parts.keys[page, place] = torch.nn.functional.pad(keys, (0, pages.layout.key_width - width))[valid]
    wider = pages.layout.value_width - v.size(-1)
    parts.values[page, place] = torch.nn.functional.pad(v.to(pages.layout.dtype), (0, wider))[valid]
    parts.exposures[page, place] = exposure.to(pages.layout.side_dtype)[valid]
    positions = positions.unsqueeze(1) if positions.dim() == 2 else positions
    parts.positions[page, place] = positions.expand(batch, heads, n)[valid].int()
    norms = torch.linalg.vector_norm(keys.to(pages.layout.side_dtype), dim=-1).masked_fill(~valid, 0.0)
    if n:
        torch.maximum(pages.key_norm, norms.amax(-1).float(), out=pages.key_norm)


@torch.no_grad()
def plain_read(pages: Pages, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`read_keys` in PyTorch."""
    parts, (numbers, valid) = _parts(pages), _numbers(pages, slots)
    places, empty = slots.long() % PAGE, ~valid
    # What was never written may not be a number: it is replaced, not multiplied.
    k, v = (x[numbers, places].masked_fill(empty.unsqueeze(-1), 0) for x in parts[:2])
    u, j = (x[numbers, places].masked_fill(empty, 0) for x in parts[2:])
    return k, v, u, j


def _dense(
    q: Tensor, rate: Tensor, positions: Tensor, keys: tuple[Tensor, Tensor, Tensor, Tensor], valid: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over keys (B, Hk, N, …) of which (B, Hk, N) are there, in the dtype of exposures."""
    k, v, u, j = keys
    batch, heads, n, width = q.shape
    dtype, groups = u.dtype, heads // max(1, k.size(1))
    stacked = q.to(dtype).reshape(batch, -1, groups * n, width)
    products = (stacked @ k[..., :width].to(dtype).transpose(-1, -2)).view(batch, -1, groups, n, k.size(2))
    distances = positions[:, None, None, :, None].long() - j[:, :, None, None, :]
    c = rate.to(dtype).reshape(batch, -1, groups, n, 1)
    logits = scale * products - c * (u[:, :, None, None, :] * distances.to(dtype))
    logits = logits.masked_fill(~valid[:, :, None, None, :], -torch.inf)
    lse = logits.logsumexp(-1)
    p = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).flatten(2, 3)
    return (p @ v.to(dtype)).view(batch, heads, n, -1), lse.view(batch, heads, n)


def _parts(pages: Pages) -> _Parts:
    layout, slab = pages.layout, pages.slab
    if not slab.size(0) and bool((pages.addresses != 0).any()):
        raise invalid_argument("pages.slab", slab, "all pages in one slab: only kernels read several")
    if not slab.size(0):
        # A page that nobody's table names.
        slab = slab.new_zeros(1, layout.nbytes)
    at = (0, layout.values_at, layout.exposures_at, layout.positions_at, layout.nbytes)
    dtypes = (layout.dtype, layout.dtype, layout.side_dtype, torch.int32)
    k, v, u, j = (slab[:, at[i] : at[i + 1]].view(dtype) for i, dtype in enumerate(dtypes))
    keys, values = k.view(-1, PAGE, layout.key_width), v.view(-1, PAGE, layout.value_width)
    return _Parts(keys, values, u, j)


def _numbers(pages: Pages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The page of each slot (B, Hk, m), 0 where there is none, and whether there is one."""
    room = pages.addresses.size(-1)
    column = (slots // PAGE).long()
    inside = (slots >= 0) & (column < room)
    if not room:
        return torch.zeros_like(column), inside
    address = pages.addresses.gather(-1, column.masked_fill(~inside, 0))
    valid = inside & (address != 0)
    number = (address - pages.slab.data_ptr()) // pages.layout.nbytes
    return number.masked_fill(~valid, 0), valid


def _check_queries(
    q: Tensor, rate: Tensor, positions: Tensor, pages: Pages, prior: tuple[Tensor, Tensor] | None, eps: float
) -> None:
    weight("eps", eps)
    layout, (rows, key_heads, _) = pages.layout, pages.addresses.shape
    if q.dim() != 4 or q.size(0) != rows or q.size(1) % max(1, key_heads) or q.size(3) > layout.key_width:
        expected = f"({rows}, a multiple of {key_heads} heads, n, up to {layout.key_width})"
        raise invalid_argument("q", q, expected)
    if q.dtype != layout.dtype:
        raise invalid_argument("q", q, f"{layout.dtype} as the pages")
    if rate.shape != q.shape[:3]:
        raise invalid_argument("rate", rate, f"one number for each query, {tuple(q.shape[:3])}")
    _check_positions(positions, ((q.size(2),), (rows, q.size(2))))
    if prior is None:
        if eps:
            raise invalid_argument("eps", eps, "0 without prior")
        return
    out, lse = prior
    if out.shape[:3] != q.shape[:3] or out.dim() != 4 or out.size(3) > layout.value_width or lse.shape != q.shape[:3]:
        shape = tuple(q.shape[:3])
        raise invalid_argument("prior", out, f"output ({shape}, up to {layout.value_width}) and log-sum-exp {shape}")


def _check_keys(pages: Pages, k: Tensor, v: Tensor, exposure: Tensor, positions: Tensor, slots: Tensor | None) -> None:
    (rows, heads, _), n = pages.addresses.shape, k.size(2) if k.dim() == 4 else 0
    for name, x, width in (("k", k, pages.layout.key_width), ("v", v, pages.layout.value_width)):
        if x.dim() != 4 or x.shape[:3] != (rows, heads, n) or x.size(3) > width:
            raise invalid_argument(name, x, f"({rows}, {heads}, n, up to {width})")
    if exposure.shape != k.shape[:3]:
        raise invalid_argument("exposure", exposure, f"one number for each key, {tuple(k.shape[:3])}")
    _check_positions(positions, ((n,), (rows, n), (rows, heads, n)))
    if slots is not None:
        _check_slots(pages, slots, n)


def _check_positions(positions: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if positions.dtype not in INTEGERS or positions.shape not in shapes:
        raise invalid_argument("positions", positions, f"integers of shape {' or '.join(map(str, shapes))}")


def _check_slots(pages: Pages, slots: Tensor, n: int | None) -> None:
    rows, heads, _ = pages.addresses.shape
    shaped = slots.dim() == 3 and slots.shape[:2] == (rows, heads) and (n is None or slots.size(2) == n)
    if slots.dtype != torch.int32 or not shaped:
        raise invalid_argument("slots", slots, f"int32 ({rows}, {heads}, {'m' if n is None else n})")
