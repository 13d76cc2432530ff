"""The cross entropy over a vocabulary: at once, or in slices of rows so that the whole logits never exist.

The sliced form computes its gradients in the forward pass, while a slice's logits are there, and keeps them instead of
the logits: R · E numbers for x and V · E for the weight, where logits would be R · V. The logits of all slices use one
buffer, in which their gradients overwrite them (on a GPU by one kernel, :mod:`gape.ops.triton.cross_entropy`).
Compilers see all of that as one operator.

Shapes: R rows (tokens), E width, V vocabulary, P the vocabulary and its padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from gape.ops import limits
from gape.ops.inputs import bias_dtype, working_dtype
from gape.utils.validation import invalid_argument

#: A target that does not count.
IGNORED = -100

#: Rows whose logits exist at once in the sliced form: enough to occupy a GPU with one product.
LOSS_ROWS = 8192

#: Rows of logits begin at multiples of so many numbers, without which matrix products on a GPU take twice the time.
ALIGNED = 64


def summed_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum over targets that count, in float32 (float64 beside float64).

    logits (..., V), int64 targets (...), −100 where none counts, and weights like targets, None for 1.
    """
    wide = logits.flatten(0, -2).to(bias_dtype(logits.dtype))
    reduction = "sum" if weights is None else "none"
    try:
        losses = F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction=reduction)
    except IndexError:
        raise _unknown_target(targets, logits.size(-1)) from None
    return losses if weights is None else (losses * weights.flatten()).sum()


def loss_weight(targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """What a summed loss is divided by to be a mean: the number of targets that count, or the sum of their weights."""
    counted = targets != IGNORED
    return counted.sum() if weights is None else weights.masked_fill(~counted, 0).sum()


def mean_loss(total: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean of a summed loss over the targets that count; 0 where none does."""
    weight = loss_weight(targets, weights)
    return total / (weight.clamp(min=1) if weights is None else torch.where(weight > 0, weight, 1))


def sliced_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The summed cross entropy of logits x·weightᵀ, of which at most :data:`LOSS_ROWS` rows exist at once.

    Logits are computed in autocast's dtype, their softmax in float32 (float64 beside float64), and the
    weight's gradient is added up in float32. One derivative only; gradients that are not required are not computed.

    Args:
        x, weight: (..., E) and (V, E).
        targets: int64 (...), −100 where none counts.
        weights: float32 like targets, what each term is multiplied by; None for 1.

    Returns:
        A single number in float32 or float64. NaN where a row that counts has a logit that is NaN or +inf, or, on a
        GPU, a target outside the vocabulary, which is a ValueError on a CPU.
    """
    _check(x, targets)
    if weights is not None and weights.shape != targets.shape:
        raise invalid_argument("weights", weights, f"{tuple(targets.shape)}, one for each target")
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        losses = token_cross_entropy(x, weight, targets)
        return losses.sum() if weights is None else (losses * weights).sum()
    total: Tensor = _Sliced.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), weight, targets.flatten(), None if weights is None else weights.flatten(), working_dtype(x)
    )
    return total


@torch.no_grad()
def token_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each target, 0 where it does not count: :func:`sliced_cross_entropy` without gradients."""
    _check(x, targets)
    dtype = working_dtype(x)
    rows, table = x.flatten(0, -2).to(dtype), _padded(weight, dtype)
    losses: Tensor = _losses(rows, table, targets.flatten(), None, weight.size(0), LOSS_ROWS, False, False)[0]
    return losses.view(targets.shape)


class _Sliced(torch.autograd.Function):
    """(x (R, E), weight (V, E), targets (R,), weights (R,) or None, dtype of the products) → the sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.dtypes, ctx.vocabulary, ctx.learned = (x.dtype, weight.dtype), weight.size(0), ctx.needs_input_grad[1]
        rows, table = x.to(dtype), _padded(weight, dtype)
        losses, of_x, of_table = _losses(rows, table, targets, weights, weight.size(0), LOSS_ROWS, True, ctx.learned)
        ctx.save_for_backward(of_x, of_table)
        total: Tensor = losses.sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        of_x, of_table = ctx.saved_tensors
        first, second = ctx.dtypes
        of_weight = (of_table[: ctx.vocabulary] * grad).to(second) if ctx.learned else None
        return of_x.to(first) * grad, of_weight, None, None, None


@torch.library.custom_op("gape::vocabulary_losses", mutates_args=())
def _losses(
    x: Tensor, table: Tensor, targets: Tensor, weights: Tensor | None, vocabulary: int, rows: int,
    derive_x: bool, derive_table: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss of each row, (R,), of x (R, E) and a padded weight (P, E) of the same dtype, and gradients of their sum.

    That of x is (R, E) in its dtype, that of the table (P, E) in float32 at least; (0, E) where not asked for.
    """
    losses, of_x, of_table = _empty(x, table, targets, weights, vocabulary, rows, derive_x, derive_table)
    of_table.zero_()
    for part, logits in _slices(x, table, targets, vocabulary, rows):
        losses[part] = _score(logits, targets[part], vocabulary, gradient=derive_x)
        if weights is not None:
            losses[part] *= weights[part]
            # The buffer holds the gradients now.
            logits.mul_(weights[part].unsqueeze(1).to(logits.dtype))
        if derive_x:
            torch.mm(logits, table, out=of_x[part])
        if derive_table:
            _add_product(of_table, logits.t(), x[part])
    return losses, of_x, of_table


@_losses.register_fake
def _empty(
    x: Tensor, table: Tensor, targets: Tensor, weights: Tensor | None, vocabulary: int, rows: int,
    derive_x: bool, derive_table: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = bias_dtype(x.dtype)
    return (
        x.new_empty(x.size(0), dtype=wide),
        x.new_empty(x.size(0) if derive_x else 0, x.size(1)),
        table.new_empty(table.size(0) if derive_table else 0, table.size(1), dtype=wide),
    )


def _slices(x: Tensor, table: Tensor, targets: Tensor, vocabulary: int, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows and their logits (n, P), all in the same buffer."""
    if targets.device.type == "cpu":
        known = (targets >= 0) & (targets < vocabulary) | (targets == IGNORED)
        if not bool(known.all()):
            raise _unknown_target(targets, vocabulary)
    buffer = x.new_empty(min(rows, x.size(0)), table.size(0))
    for start in range(0, x.size(0), rows):
        part = slice(start, min(start + rows, x.size(0)))
        yield part, torch.mm(x[part], table.t(), out=buffer[: part.stop - start])


def _score(logits: Tensor, targets: Tensor, vocabulary: int, *, gradient: bool) -> Tensor:
    """The loss of each row of padded logits (n, P), (n,); their gradients overwrite them if `gradient`."""
    if limits.HAS_TRITON and logits.is_cuda and logits.dtype != torch.float64:
        from gape.ops.triton.cross_entropy import score_rows  # noqa: PLC0415

        return score_rows(logits, targets, vocabulary, IGNORED, gradient)
    return _score_stepwise(logits, targets, vocabulary, gradient)


def _score_stepwise(logits: Tensor, targets: Tensor, vocabulary: int, gradient: bool) -> Tensor:
    """What the kernel does, in several passes."""
    wide = logits.to(bias_dtype(logits.dtype))
    counted = (targets != IGNORED).unsqueeze(1)
    at = targets.clamp(0, vocabulary - 1).unsqueeze(1)
    log_sum = wide[:, :vocabulary].logsumexp(-1, keepdim=True)
    # A target outside the vocabulary or an infinite logit gives NaN, so that it is noticed.
    log_sum = log_sum.masked_fill(counted & (at != targets.unsqueeze(1)) | log_sum.isposinf(), float("nan"))
    picked = wide.gather(1, at)
    if gradient:
        wide = wide.sub_(log_sum).exp_() if wide is logits else wide.sub(log_sum).exp_()
        wide.scatter_(1, at, (picked - log_sum).exp() - 1).masked_fill_(~counted, 0)
        # Columns of padding may hold anything: their rows of the table are zero.
        wide[:, vocabulary:] = 0
        logits.copy_(wide)
    return (log_sum - picked).masked_fill(~counted, 0).squeeze(1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a·b, added up in total's dtype."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype` with rows of zeros up to a multiple of :data:`ALIGNED`."""
    return F.pad(weight.detach().to(dtype), (0, 0, 0, -weight.size(0) % ALIGNED))


def _check(x: Tensor, targets: Tensor) -> None:
    """Refuse targets beyond which kernels would read."""
    if targets.shape != x.shape[:-1] or targets.dtype != torch.int64:
        raise invalid_argument("targets", targets, f"int64 {tuple(x.shape[:-1])}, one for each row of x")


def _unknown_target(targets: Tensor, vocabulary: int) -> ValueError:
    return invalid_argument("targets", targets, f"values from 0 to {vocabulary - 1}, or {IGNORED}")
