"""The portable default: six extra coordinates carry −c_i·u_j·(i − j) to working precision at any length.

The rate c (over the softmax scale) and the exposure u are rounded once to the working dtype, the same on both
sides; the products c·i and u·j are then carried exactly, each in three pieces of the working dtype:

    query [−(c·i)₁, −(c·i)₂, −(c·i)₃, c, c, c]      key [u, u, u, (u·j)₁, (u·j)₂, (u·j)₃]

Positions are counted from an anchor among the queries (softmax does not see a common shift), and a power of two,
UNIT, moves magnitude between the sides so that float16 does not overflow. Rounding is straight-through for gradients.

A fused backward returns dq and dk in the working dtype, and the gradient of a gate is the difference of two such
columns, so it loses what the distance to the anchor costs. Where gates learn, up to 2,048 queries therefore have two
anchors, one for each half. In index order both are near their queries and two pieces are enough, so this takes six
coordinates too (explicit positions may be anywhere: there three pieces stay, and it takes nine):

    query [−(c·i)₁, −(c·i)₂, c, c, 0, 0] or [−(c·i)₁, −(c·i)₂, 0, 0, c, c]
    key   [u, u, (u·j)₁, (u·j)₂, (u·j′)₁, (u·j′)₂]      i from its own anchor, j from the first, j′ from the second

More queries are cut into calls of 2,048, each with its own copy of the keys: gate gradients stay exact at any length.

In half precision on a GPU one kernel writes q and k with their columns, :mod:`gape.ops.triton.augment`; elsewhere, and
for explicit positions, :mod:`gape.ops.columns` does.
`docs/results/precision.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gape.ops import columns, limits, sdpa
from gape.ops.inputs import Problem
from gape.ops.limits import HALVES


def calls(problem: Problem) -> Iterator[sdpa.Call]:
    """The prepared attention calls: one, or one per chunk of queries.

    Chunks are needed where a mask has to be drawn, and where gates learn in half precision: there every query must be
    near an anchor.
    """
    rows = columns.ANCHORED_ROWS if columns.learns_shortly(problem) else None
    if sdpa.draws_mask(problem.visibility, problem.q):
        rows = min(columns.ANCHORED_ROWS, sdpa.MASK_ROWS)
    spans = sdpa.chunks(problem.visibility.n_q, rows)
    k, v = problem.k, problem.v
    if len(spans) > 1:
        # The chunks' gradients are added up in float32 and rounded once.
        k, v = k.to(problem.exposure.dtype), v.to(problem.exposure.dtype)
    for start, stop in spans:
        visibility = problem.visibility.rows(start, stop)
        exact = sdpa.exact_call(problem.rows(start, stop))
        if exact is not None:
            yield exact
            continue
        yield sdpa.prepare(
            *_augmented(problem, k[:, :, : visibility.n_k].to(problem.k.dtype), start, stop),
            v[:, :, : visibility.n_k].to(problem.v.dtype),
            visibility,
            problem.scale,
        )


def _augmented(problem: Problem, k: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Queries start … stop − 1 and the keys k with the columns of the bias, by one kernel where it can run."""
    q, visibility = problem.q[:, :, start:stop], problem.visibility
    one_pass = q.dtype in HALVES and limits.triton_cannot(q, problem.v) is None
    if not visibility.index_order or not one_pass:
        q_columns, k_columns = columns.sides(problem, start, stop)
        return torch.cat([q, q_columns], dim=-1), torch.cat([k, k_columns], dim=-1)
    from gape.ops.triton.augment import augment  # noqa: PLC0415

    offset = visibility.n_k - visibility.n_q
    anchors = columns.index_anchors(start, stop, offset, near=columns.learns_shortly(problem))
    rate, exposure = problem.rate[:, :, start:stop], problem.exposure[:, :, : k.size(2)]
    out_q, out_k = augment(q, k, rate, exposure, columns.UNIT / problem.scale, *anchors, offset + start)
    return out_q, out_k
