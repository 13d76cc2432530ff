"""Collectives with gradients, and a count of the bytes that they receive."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Names of torch 2.13 and later; before, the same functions were called otherwise.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Traffic(Counter[str]):
    """Bytes that this process received from others, by collective: "gather", "scatter", "blocks" and "bounds"."""

    def add(self, kind: str, tensor: Tensor, ways: int) -> None:
        """Count a tensor of which all but one part in `ways` came from others."""
        self[kind] += tensor.nbytes * (ways - 1) // ways


def gather(x: Tensor, group: Any, traffic: Traffic, kind: str = "gather") -> Tensor:
    """The tensors of all processes, (K, ...) in the order of their ranks; gradients are added up where x came from."""
    gathered: Tensor = _Gather.apply(x, group, traffic, kind)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, traffic: Traffic, kind: str) -> Tensor:
        ctx.group, ctx.traffic, ways = group, traffic, dist.get_world_size(group)
        out = x.new_empty(ways, *x.shape)
        _all_gather(out.flatten(0, 1) if x.dim() else out, x.contiguous(), group=group)
        traffic.add(kind, out, ways)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        own = grad.new_empty(grad.shape[1:])
        _reduce_scatter(own, grad.contiguous().flatten(0, 1), group=ctx.group)
        ctx.traffic.add("scatter", grad, grad.size(0))
        return own, None, None, None


def exchange(x: Tensor, wanted: Tensor, wants: Tensor, group: Any, traffic: Traffic) -> Tensor:
    """Blocks of the processes' tensors, each sent only to the processes that want it; gradients go back the same way.

    Of x, this process's M blocks of S tokens (B, H, M, S, W), process k wants those in wanted[k], and this one wants
    those in wants[k] of process k's: bool (K, B, H, M). Returns (K, B, H, M, S, W), zero where a block was not wanted.
    """
    received: Tensor = _Exchange.apply(x, wanted, wants, group, traffic)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wanted: Tensor, wants: Tensor, group: Any, traffic: Traffic) -> Tensor:
        ctx.save_for_backward(wanted, wants)
        ctx.group, ctx.traffic = group, traffic
        sent = torch.cat([x[mask] for mask in wanted])
        received = _all_to_all(sent, _counts(wanted), _counts(wants), group)
        traffic["blocks"] += received.nbytes
        out = x.new_zeros(wants.size(0), *x.shape)
        out[wants] = received
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        wanted, wants = ctx.saved_tensors
        counts = _counts(wanted)
        back = _all_to_all(grad[wants], _counts(wants), counts, ctx.group)
        ctx.traffic["blocks"] += back.nbytes
        own = grad.new_zeros(grad.shape[1:])
        for mask, part in zip(wanted, torch.split(back, counts), strict=True):
            own[mask] += part
        return own, None, None, None, None


def _counts(masks: Tensor) -> list[int]:
    return masks.flatten(1).sum(1).tolist()


def _all_to_all(sent: Tensor, sizes: list[int], expected: list[int], group: Any) -> Tensor:
    received = sent.new_empty(sum(expected), *sent.shape[1:])
    dist.all_to_all_single(received, sent.contiguous(), expected, sizes, group=group)
    return received
