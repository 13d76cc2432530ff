"""Queries too far apart for one anchor: which chunks of a call are so, and the exact call that runs in their place.

Coordinates carry c·i and u·j counted from an anchor among the queries, and a product of matrices adds both up in
float32 (float64 beside float64). Where a query stands far from the anchor the two are large and cancel, so a logit is
off by about 2⁻²⁴ · c·|i − anchor|, in every dtype but float64. The definition takes the difference of integers first.

Positions are read on a CPU alone: elsewhere that would wait for the device, or break a compiled graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gape.ops import inputs, reference, sdpa
from gape.ops.columns import UNIT
from gape.ops.inputs import Problem, beside_heads

#: c·|i − anchor| in logits up to which coordinates are used: beyond it, what is lost shows beside a dtype's rounding.
MOST_LOST = {torch.float64: 2.0**23, torch.float32: 2.0**10, torch.bfloat16: 2.0**17, torch.float16: 2.0**14}


@dataclass(frozen=True, kw_only=True)
class ExactCall(sdpa.Call):
    """A call by the definition, for as many queries as a mask is drawn for."""

    problem: Problem

    def backend(self) -> str:
        """No backend of torch."""
        return "reference"

    def run(self) -> Tensor:
        """The attention output, (B, Hq, Nq, Dv)."""
        return reference.run(self.problem)


def exact_call(problem: Problem) -> ExactCall | None:
    """The call by the definition for a chunk of queries that are too far apart; None where coordinates will do."""
    if not _scattered(problem):
        return None
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    kind, width = problem.seen.kind, v.size(-1)
    return ExactCall(problem=problem, q=q, k=k, v=v, mask=None, kind=kind, scale=scale, empty=None, value_width=width)


@torch.no_grad()
def _scattered(problem: Problem) -> bool:
    seen, dtype = problem.seen, problem.q.dtype
    i, j = seen.q_positions, seen.k_positions
    if i is None or j is None or not inputs.readable(i) or problem.q.numel() == 0:
        return False
    anchor = seen.anchor(0, seen.n_q)
    lost = problem.rate * beside_heads((i - anchor).abs(), problem.rate.dtype)
    # A gate that is not a number shows either way.
    if bool((lost > MOST_LOST[dtype]).any()):
        return True
    # Beyond this, float16 does not hold a key's share.
    reach = torch.finfo(dtype).max / 2 * UNIT
    return dtype == torch.float16 and any(bool(((x - anchor).abs() > reach).any()) for x in (i, j))
