"""What the gates of a trained model do on average, and how far a query can attend by the theory's bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gape import theory
from gape.analysis.maps import mean_mask
from gape.analysis.tap import Attended, tap
from gape.ops.inputs import bias_dtype
from gape.positions.biases import ALiBi


@torch.no_grad()
def routing_variables(model: nn.Module, ids: Tensor) -> list[dict[str, Any]]:
    """What the gates of every layer and head do on average over ids (B, N); no N × N tensor is made.

    Returns:
        A record per gated layer and query head, first layer first: `layer` and `head` from 0, `mean_mask` (the mean of
        the paper's M ≥ 0 over all pairs j ≤ i), `landmark` (of the keys that the head reads), `gate`, `amplitude`.
        Empty for a scheme without gates.
    """
    means: dict[int, Tensor] = {}

    def receive(layer: int, attended: Attended) -> None:
        gates = attended.gates
        if gates is not None and attended.gate is not None and attended.landmark is not None:
            groups = attended.q.size(1) // attended.k.size(1)
            landmark = attended.landmark.double().mean((0, 2)).repeat_interleave(groups)
            gate, amplitude = attended.gate.double().mean((0, 2)), gates.amplitude.double()
            means[layer] = torch.stack([mean_mask(attended).mean(0), landmark, gate, amplitude], dim=1)

    with tap(model, receive):
        model(ids, logits_to_keep=1)
    names = ("mean_mask", "landmark", "gate", "amplitude")
    return [
        {"layer": layer, "head": head, **dict(zip(names, values, strict=True))}
        for layer in sorted(means)
        for head, values in enumerate(means[layer].tolist())
    ]


@torch.no_grad()
def effective_context(attended: Attended, p: float = 0.01) -> Tensor | None:
    """Δ_eff of every query: unprotected keys from this distance on hold at most p of its attention together.

    The bound on scores is that of the norms, over the keys that a query sees. A key with landmark l has the horizon
    Δ_eff / (1 − l). ALiBi is the same operator with a constant rate and no landmarks. p lies in (0, 1).

    Returns:
        (B, Hq, Nq) in float32 (float64 beside float64), inf where the rate is 0; None for a scheme without a rate or
        tokens out of index order.
    """
    rate = _rate(attended)
    if rate is None or not attended.visibility.index_order:
        return None
    offset = attended.visibility.n_k - attended.visibility.n_q
    earlier = torch.arange(offset, attended.visibility.n_k, device=rate.device)
    return torch.as_tensor(theory.effective_context_length(rate, score_bounds(attended), earlier, p))


@torch.no_grad()
def score_bounds(attended: Attended) -> Tensor:
    """No score of a query with a key up to its own is larger, by their norms: (B, Hq, Nq), for tokens in index order.

    In float32 (float64 beside float64).
    """
    dtype = bias_dtype(attended.q.dtype)
    offset = attended.visibility.n_k - attended.visibility.n_q
    groups = attended.q.size(1) // attended.k.size(1)
    longest = torch.linalg.vector_norm(attended.k.to(dtype), dim=-1).cummax(-1).values[..., offset:]
    lengths = torch.linalg.vector_norm(attended.q.to(dtype), dim=-1)
    bounds: Tensor = attended.scale * lengths * longest.repeat_interleave(groups, dim=1)
    return bounds


def _rate(attended: Attended) -> Tensor | None:
    """Logits that an unprotected key loses per token of distance, (B, Hq, Nq), or None."""
    if attended.rate is not None:
        return attended.rate
    if not isinstance(attended.scheme, ALiBi):
        return None
    here = torch.zeros(1, dtype=torch.int64, device=attended.q.device)
    slopes = -attended.scheme.bias(here + 1, here)[0, :, 0].to(bias_dtype(attended.q.dtype))
    return slopes.expand(attended.q.size(0), -1, attended.q.size(2))
