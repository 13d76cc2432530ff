"""How large the queries of a prompt are, for bounds on those to come.

Shapes: B rows, Hq / Hk query / key heads, n tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gape.ops.limits import HAS_TRITON, MOST_PROGRAMS, TRITON_WIDTH


@torch.no_grad()
def measure_queries(
    q: Tensor, k: Tensor, reach: Tensor, own: Tensor, *, scale: float, real: Tensor | None = None
) -> None:
    """Raise running maxima of scale · ‖q‖ and of −scale · q · k, over each query's own key, by the queries of a prompt.

    Args:
        q, k: (B, Hq, n, D) and (B, Hk, n, D), rotated.
        reach, own: the maxima, each (Hq,) in float32 or float64; infinite once a query was not a number.
        scale: the softmax scale.
        real: bool (B, n), False for tokens that do not count; None counts all.
    """
    few = q.size(0) * q.size(1) <= MOST_PROGRAMS and q.size(3) <= TRITON_WIDTH
    if HAS_TRITON and q.is_cuda and real is None and few and q.dtype != torch.float64 and q.numel():
        from gape.ops.triton import query_range  # noqa: PLC0415

        query_range.measure_queries(q, k, reach, own, scale=scale)
        return
    wide = torch.promote_types(q.dtype, torch.float32)
    norms = scale * torch.linalg.vector_norm(q, dim=-1, dtype=wide)
    products = -scale * (q.to(wide) * k.to(wide).repeat_interleave(q.size(1) // k.size(1), dim=1)).sum(-1)
    if real is not None:
        norms, products = (x.masked_fill(~real[:, None], -torch.inf) for x in (norms, products))
    for known, x in ((reach, norms), (own, products)):
        most = x.amax((0, 2)).to(known.dtype)
        torch.maximum(known, torch.where(most.isnan(), torch.inf, most), out=known)
