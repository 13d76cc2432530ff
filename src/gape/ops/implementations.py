"""The implementations of the operator, one record each, and the one place that chooses among them.

The operator, layers, models of `transformers`, `gape.explain` and `gape doctor` all ask :func:`choose`, and layers that
have not projected q and k yet ask :func:`choose_fused` before. Measured rules count first, those of this machine before
those that come with the library (`gape.ops.dispatch`), then what is right on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gape.ops import columns, dispatch, limits, prologue, rank2, reference, sdpa, split
from gape.ops.columns import significand_bits
from gape.ops.inputs import Problem
from gape.ops.limits import DECODE_QUERIES, HALVES
from gape.ops.prologue import Projection
from gape.utils.validation import invalid_argument


class Details(NamedTuple):
    """The output of the operator and what else a kernel knows when it has run.

    Attributes:
        out: (B, Hq, Nq, Dv) in q's dtype.
        lse: natural log-sum-exp of each query's logits, (B, Hq, Nq) in float32 (float64 beside float64), without
            gradient; −inf where a query sees nothing.
        visited: fraction of the visible key tiles that were visited, one number; 1 where none may be skipped.
    """

    out: Tensor
    lse: Tensor
    visited: Tensor


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to run the operator.

    Attributes:
        name: what `impl=` calls it.
        run: the output (B, Hq, Nq, Dv) of (problem, eps, strict). It may drop a weight of eps. With strict it raises
            ValueError before a backend of torch keeps an Nq × Nk matrix.
        cannot: why it cannot run a problem; None where it can.
        remark: why `auto` would not take it where it can run; None where measured rules alone say that.
        details: (problem, eps) → output, log-sum-exp and visited tiles; None where they are not known.
        calls: the calls of `scaled_dot_product_attention` it makes, in order; None where it makes none.
        fused: how it runs after a fused prologue; None where it has none.
        quadratic: whether it always keeps an Nq × Nk matrix.
    """

    name: str
    run: Callable[[Problem, float, bool], Tensor]
    cannot: Callable[[Problem], str | None] = lambda problem: None
    remark: Callable[[Problem], str | None] = lambda problem: None
    details: Callable[[Problem, float], Details] | None = None
    calls: Callable[[Problem], Iterator[sdpa.Call]] | None = None
    fused: prologue.Fused | None = None
    quadratic: bool = False


class Choice(NamedTuple):
    """An implementation and why it runs.

    Attributes:
        name: of the implementation.
        reason: why it is the one.
    """

    name: str
    reason: str


class FusedChoice(NamedTuple):
    """An implementation that runs after a fused prologue.

    Attributes:
        choice: the implementation and why it runs.
        fused: how it runs.
        width: of the rows that the prologue takes and makes of q and k.
    """

    choice: Choice
    fused: prologue.Fused
    width: int


def choose(problem: Problem, eps: float = 0.0, impl: str = "auto", *, details: bool = False) -> Choice:
    """The implementation for a call.

    Args:
        problem: the call.
        eps: weight that may be dropped; nothing has to be.
        impl: "auto", or the name of the implementation to use.
        details: choose among those that know log-sum-exp and visited tiles.

    Raises:
        ValueError: an unknown name, or one that cannot run the call.
    """
    known = [name for name, each in IMPLEMENTATIONS.items() if each.details is not None or not details]
    if impl not in ("auto", *known):
        raise invalid_argument("impl", impl, f"'auto' or one of {known}")
    if impl != "auto":
        obstacle = IMPLEMENTATIONS[impl].cannot(problem)
        if obstacle is not None:
            raise ValueError(f"impl: got {impl!r}, which {obstacle}")
        return Choice(impl, "asked for")
    if details:
        runs = IMPLEMENTATIONS["triton"].cannot(problem) is None
        return Choice("triton", "knows both") if runs else Choice("reference", "knows both, on every device")
    device = device_of(problem)
    if device is not None:
        for rule in RULES:
            if rule.fits(problem, eps, device) and IMPLEMENTATIONS[rule.impl].cannot(problem) is None:
                return Choice(rule.impl, rule.reason)
    return portable(problem)


def choose_fused(projection: Projection, impl: str = "auto") -> FusedChoice | None:
    """The implementation for a layer whose q and k one pass makes ready; None where its scheme's steps have to.

    After the steps, :func:`choose` says what runs.

    Args:
        projection: what the layer is about to project, causal and in index order.
        impl: as :func:`choose` takes it. "auto" is split here: after its prologue one call of a fused backend attends.
    """
    name = "split" if impl == "auto" else impl
    fused = IMPLEMENTATIONS[name].fused
    if fused is None or not projection.on_gpu or not prologue.ready(projection.device, projection.dtype):
        return None
    width = fused.width(projection)
    # Gaps are made in the weights, which must then be all that the projection does.
    if width is None or (width != projection.content and not projection.bare):
        return None
    return FusedChoice(
        Choice(name, "one call over rows that carry the bias" if impl == "auto" else "asked for"), fused, width
    )


def device_of(problem: Problem) -> str | None:
    """The name by which rules know the device; None where there are none, on a CPU."""
    return torch.cuda.get_device_properties(problem.q.device).name if problem.q.is_cuda else None


def portable(problem: Problem) -> Choice:
    """What is right on every device: the choice where nothing was measured."""
    dtype = _name(problem.q.dtype)
    if _decodes(problem):
        return Choice("decode", f"reads keys where they are, for up to {DECODE_QUERIES} queries at any length")
    if _positions_unread(problem) and IMPLEMENTATIONS["triton"].cannot(problem) is None:
        return Choice("triton", "takes distances pair by pair, however far apart explicit positions are")
    if problem.q.dtype in HALVES:
        if problem.gates_learn and problem.visibility.n_q > columns.ANCHORED_ROWS:
            calls = f"in calls of {columns.ANCHORED_ROWS:,} queries"
            return Choice("split", f"exact bias and gate gradients in {dtype}, {calls}")
        return Choice("split", f"exact bias in {dtype}")
    if significand_bits(problem.q) <= 11:
        return Choice("split", "TF32 products would ruin the two-coordinate form")
    return Choice("rank2", f"two coordinates are enough in {dtype}")


def others(problem: Problem, eps: float = 0.0) -> dict[str, str]:
    """For every implementation that `auto` does not choose: why it cannot run, or why it is not the one."""
    chosen = choose(problem, eps)
    measured = chosen != portable(problem)
    return {
        name: each.cannot(problem) or _not_best(each, problem, measured)
        for name, each in IMPLEMENTATIONS.items()
        if name != chosen.name
    }


def _not_best(implementation: Implementation, problem: Problem, measured: bool) -> str:
    """What speaks against an implementation that could run; `measured` where another was chosen by measurement."""
    remark = implementation.remark(problem)
    if remark is not None and not (measured and implementation.name == "split"):
        return remark
    # The table has winners only: who lost to them, and who never took part, the rows know.
    return "not measured as better for this call" if measured else "not measured for this call: gape doctor --tune"


def _decodes(problem: Problem) -> bool:
    return limits.decodes(problem.q, problem.k, problem.v, learns=problem.learns)


def _positions_unread(problem: Problem) -> bool:
    """Whether positions may be far apart and cannot be read: explicit ones on a GPU. TF32 keeps less than they cost."""
    exact = problem.q.dtype in HALVES or significand_bits(problem.q) > 11
    return problem.q.is_cuda and not problem.visibility.index_order and exact


#: What speaks against coordinates where :func:`_positions_unread` says yes.
_FAR = "loses the bias where explicit positions are far apart, which is not read on a GPU"


def _rank2_remark(problem: Problem) -> str:
    if problem.q.dtype in HALVES:
        return f"loses the bias to rounding in {_name(problem.q.dtype)}"
    return _FAR if _positions_unread(problem) else "loses the bias where products are rounded to TF32"


def _split_remark(problem: Problem) -> str:
    if _decodes(problem):
        return "copies all keys for a few queries"
    return _FAR if _positions_unread(problem) else "takes more coordinates"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reference_details(problem: Problem, eps: float) -> Details:
    lse = reference.log_sum_exp(problem)
    return Details(reference.run(problem), lse, lse.new_ones(()))


# Kernels are imported when they run, so that nothing else needs Triton.


def _triton(problem: Problem, eps: float, strict: bool) -> Tensor:
    from gape.ops.triton import attention  # noqa: PLC0415

    return attention.run(problem, eps)


def _triton_details(problem: Problem, eps: float) -> Details:
    from gape.ops.triton import attention  # noqa: PLC0415

    return Details(*attention.answer(problem, eps))


def _decode_details(problem: Problem, eps: float) -> Details:
    from gape.ops.triton import decode  # noqa: PLC0415

    out, lse = decode.run(problem)
    return Details(out, lse, lse.new_ones(()))


#: Every implementation by its name.
IMPLEMENTATIONS: dict[str, Implementation] = {
    each.name: each
    for each in (
        Implementation(
            name="reference",
            run=lambda problem, eps, strict: reference.run(problem),
            remark=lambda problem: "keeps an Nq × Nk matrix: the definition, for checks",
            details=_reference_details,
            quadratic=True,
        ),
        Implementation(
            name="rank2",
            run=lambda problem, eps, strict: sdpa.run_all(rank2.calls(problem), strict=strict),
            remark=_rank2_remark,
            calls=rank2.calls,
        ),
        Implementation(
            name="split",
            run=lambda problem, eps, strict: sdpa.run_all(split.calls(problem), strict=strict),
            remark=_split_remark,
            calls=split.calls,
            fused=prologue.SPLIT,
        ),
        Implementation(
            name="triton",
            run=_triton,
            cannot=lambda problem: limits.triton_cannot(problem.q, problem.v),
            details=_triton_details,
            fused=prologue.TRITON,
        ),
        Implementation(
            name="decode",
            run=lambda problem, eps, strict: _decode_details(problem, eps).out,
            cannot=lambda problem: limits.decode_cannot(problem.q, problem.k, problem.v, learns=problem.learns),
            details=_decode_details,
        ),
    )
}

#: The measured tables, read once, and their rules in the order in which they count.
TABLES = dispatch.read(IMPLEMENTATIONS)
RULES = (*TABLES.here, *TABLES.packaged)
