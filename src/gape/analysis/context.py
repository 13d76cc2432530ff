"""How far the theory says a query can look, for setting beside what its attention uses."""

from __future__ import annotations

import torch
from torch import Tensor

from gape import theory
from gape.analysis.tap import Attended
from gape.ops.problem import bias_dtype
from gape.positions.biases import ALiBi


@torch.no_grad()
def effective_context(attended: Attended, p: float = 0.01) -> Tensor | None:
    """Δ_eff of every query: unprotected keys from this distance on hold at most p of its attention together.

    The bound on scores is that of the norms, over the keys that a query sees. A key with landmark l has the horizon
    Δ_eff / (1 − l). ALiBi is the same operator with a constant rate and no landmarks.

    Args:
        attended: what a layer did, in index order.
        p: the attention that may be given up, in (0, 1).

    Returns:
        (B, Hq, Nq) in float32 (float64 beside float64), inf where the rate is 0; None for a scheme without a rate or
        tokens out of index order.

    Raises:
        ValueError: p out of range.
    """
    rate = _rate(attended)
    if rate is None or not attended.seen.index_order:
        return None
    offset = attended.seen.n_k - attended.seen.n_q
    groups = attended.q.size(1) // attended.k.size(1)
    longest = torch.linalg.vector_norm(attended.k.to(rate.dtype), dim=-1).cummax(-1).values[..., offset:]
    lengths = torch.linalg.vector_norm(attended.q.to(rate.dtype), dim=-1)
    s_max = attended.scale * lengths * longest.repeat_interleave(groups, dim=1)
    earlier = torch.arange(offset, attended.seen.n_k, device=rate.device)
    return torch.as_tensor(theory.effective_context_length(rate, s_max, earlier, p))


def _rate(attended: Attended) -> Tensor | None:
    """Logits that an unprotected key loses per token of distance, (B, Hq, Nq), or None."""
    if attended.rate is not None:
        return attended.rate
    if not isinstance(attended.scheme, ALiBi):
        return None
    here = torch.zeros(1, dtype=torch.int64, device=attended.q.device)
    slopes = -attended.scheme.bias(here + 1, here)[0, :, 0].to(bias_dtype(attended.q.dtype))
    return slopes.expand(attended.q.size(0), -1, attended.q.size(2))
