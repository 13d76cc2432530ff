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
    """Bytes that this process received from others, by collective: "gather" and "scatter"."""

    def add(self, kind: str, tensor: Tensor, ways: int) -> None:
        """Count a tensor of which all but one part in `ways` came from others."""
        self[kind] += tensor.nbytes * (ways - 1) // ways


def gather(x: Tensor, group: Any, traffic: Traffic) -> Tensor:
    """The tensors of all processes, (K, ...) in the order of their ranks; gradients are added up where x came from."""
    gathered: Tensor = _Gather.apply(x, group, traffic)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, traffic: Traffic) -> Tensor:
        ctx.group, ctx.traffic, ways = group, traffic, dist.get_world_size(group)
        out = x.new_empty(ways, *x.shape)
        _all_gather(out.flatten(0, 1) if x.dim() else out, x.contiguous(), group=group)
        traffic.add("gather", out, ways)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        own = grad.new_empty(grad.shape[1:])
        _reduce_scatter(own, grad.contiguous().flatten(0, 1), group=ctx.group)
        ctx.traffic.add("scatter", grad, grad.size(0))
        return own, None, None
