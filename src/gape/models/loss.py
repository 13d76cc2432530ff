"""The loss over a vocabulary: in one piece, or in slices of rows so that logits never exist whole.

The sliced form computes its gradients in the forward pass, while a slice's logits are there, and keeps them instead of
the logits: R · E numbers for x and V · E for the weight, where logits would be R · V.

Shapes: R rows (tokens), E width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.ops.checks import refuse

#: A target that counts for nothing.
IGNORED = -100

#: Rows whose logits exist at once in the sliced form: large enough for a GPU to be busy with one product.
LOSS_ROWS = 8192

#: Rows of logits begin at multiples of so many numbers, without which matrix products on a GPU take twice the time.
ALIGNED = 64


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over targets that count, in float32 (float64 beside float64).

    Args:
        logits: (..., V).
        targets: int64 (...), −100 where none counts.

    Raises:
        ValueError: on a CPU, for a target outside the vocabulary.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    try:
        return F.cross_entropy(logits.flatten(0, -2).to(wide), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    except IndexError:
        raise _foreign(targets, logits.size(-1)) from None


def sliced_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The summed cross entropy of logits x·weightᵀ, of which never more than :data:`LOSS_ROWS` rows exist.

    Logits are computed in the dtype autocast asks for, their softmax in float32 (float64 beside float64), and the
    slices' gradients of the weight are added up in float32. One derivative only.

    Args:
        x: (..., E).
        weight: (V, E).
        targets: int64 (...), −100 where none counts.

    Returns:
        A single number in float32 or float64.

    Raises:
        ValueError: on a CPU, for a target outside the vocabulary.
    """
    x, targets = _rows(x, weight, targets)
    if not torch.is_grad_enabled():
        return _each(x, weight, targets).sum()
    total: Tensor = _Sliced.apply(x, weight, targets, working_dtype(x))  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def token_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of every target apart, sliced like :func:`sliced_cross_entropy` and without gradients.

    Returns:
        targets' shape, in float32 or float64; 0 where a target does not count.

    Raises:
        ValueError: on a CPU, for a target outside the vocabulary.
    """
    rows, flat = _rows(x, weight, targets)
    return _each(rows, weight, flat).view(targets.shape)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product of x here: autocast's where that would cast x."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class _Slice(NamedTuple):
    """What one slice of n rows gives: `wide` are its logits (n, V and the columns of padding), the others (n, 1)."""

    x: Tensor
    targets: Tensor
    counted: Tensor
    wide: Tensor
    log_sum: Tensor
    picked: Tensor

    @property
    def loss(self) -> Tensor:
        return (self.log_sum - self.picked) * self.counted


class _Sliced(torch.autograd.Function):
    """(x (R, E), weight (V, E), targets (R,), dtype of the products) → the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        table = _padded(weight, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x.device)
        of_x, of_table = [], torch.zeros_like(table, dtype=wide)
        for part in _slices(x, table, targets, weight.size(0)):
            total = total + part.loss.sum()
            # Columns of padding may hold anything finite: their rows of the table are zero, their gradient is cut off.
            share = part.wide.sub_(part.log_sum).clamp_(max=0).exp_().mul_(part.counted).to(dtype)
            of_target = ((part.picked - part.log_sum).exp() - 1) * part.counted
            share.scatter_(1, part.targets, of_target.to(dtype))
            of_x.append(share @ table)
            of_table = of_table + (share.t() @ part.x).to(wide)
        joined = torch.cat(of_x) if of_x else torch.zeros_like(x, dtype=dtype)
        ctx.save_for_backward(joined, of_table[: weight.size(0)])
        ctx.dtypes = x.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = grads
        of_x, of_weight = ctx.saved_tensors
        first, second = ctx.dtypes
        return (of_x * grad).to(first), (of_weight * grad).to(second), None, None


def _slices(x: Tensor, table: Tensor, targets: Tensor, vocabulary: int) -> Iterator[_Slice]:
    wide = torch.promote_types(table.dtype, torch.float32)
    for start in range(0, x.size(0), LOSS_ROWS):
        rows, wanted = (y[start : start + LOSS_ROWS] for y in (x, targets.unsqueeze(1)))
        rows = rows.to(table.dtype)
        counted = wanted != IGNORED
        wanted = wanted.clamp(min=0)
        logits = F.linear(rows, table).to(wide)
        log_sum = logits[:, :vocabulary].logsumexp(-1, keepdim=True)
        yield _Slice(rows, wanted, counted.to(wide), logits, log_sum, logits.gather(1, wanted))


def _each(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss of every row, (R,)."""
    table = _padded(weight, working_dtype(x))
    losses = [part.loss.squeeze(1) for part in _slices(x, table, targets, weight.size(0))]
    return torch.cat(losses) if losses else x.new_zeros(0, dtype=torch.promote_types(x.dtype, torch.float32))


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype` with rows of zeros up to a multiple of :data:`ALIGNED`."""
    return F.pad(weight.detach().to(dtype), (0, 0, 0, -weight.size(0) % ALIGNED))


def _rows(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.compiler.is_compiling() and targets.device.type == "cpu":
        known = (targets >= 0) & (targets < weight.size(0)) | (targets == IGNORED)
        if not bool(known.all()):
            raise _foreign(targets, weight.size(0))
    return x.flatten(0, -2), targets.flatten()


def _foreign(targets: Tensor, vocabulary: int) -> ValueError:
    return refuse("targets", targets, f"values from 0 to {vocabulary - 1}, or {IGNORED}")
