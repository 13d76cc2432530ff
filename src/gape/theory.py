"""The paper's bounds as functions: what a row of GAPE attention can and cannot do.

A query at position i sees keys at positions j ≤ i, its own key among them, with logits

    a_ij = s_ij − rate · (1 − l_j) · (i − j).

`docs/results/theory.md` has the statements, and where and why they differ from the paper's. Arguments:

    i, j, k, a, b     positions of the query and of keys, any numbers
    distance          i − k ≥ 0
    rate              Γ·g_i/T ≥ 0, the logits this query takes off a key per token of distance
    rate_min          Γ·ε/T ≥ 0, a number no query's rate falls below
    landmark          l_k in [0, 1] of the key
    s_max             a number no |s_ij| exceeds, ≥ 0: see `score_bound`
    n_unprotected     how many keys are unprotected, ≥ 0
    p                 the attention that may be lost, in (0, 1)
    depth             ρ = k/i in [0, 1)

Each is a Python number or a tensor of any shape, and they broadcast together. Python numbers alone give a
Python number. Otherwise the result is a tensor of the broadcast shape: float64 when no argument is a floating
tensor, else the floating tensors' promoted dtype, at least float32, which holds positions to 2²⁴. Gradients flow.
Every function raises ValueError for a value outside its argument's domain; that check waits for the device.
"""

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

__all__ = [
    "effective_context_length",
    "elimination_distance",
    "gate_to_eliminate",
    "landmark_threshold",
    "log_partition_bound",
    "logit_gap_bound",
    "mask",
    "relative_mask",
    "required_landmark",
    "retrieval_limit",
    "retrieval_margin",
    "score_bound",
    "unprotected_mass_bound",
    "unprotected_mass_bound_simple",
    "visible",
]

Value = float | Tensor
Domain = tuple[Callable[[Tensor], Tensor], str]

_UNIT: Domain = (lambda x: (x >= 0) & (x <= 1), "in [0, 1]")
_NON_NEGATIVE: Domain = (lambda x: (x >= 0) & x.isfinite(), "finite and >= 0")

# Arguments not named here (the positions) may be any number.
_DOMAINS: dict[str, Domain] = {
    "landmark": _UNIT,
    "landmark_b": _UNIT,
    "max_landmark": _UNIT,
    "rate": _NON_NEGATIVE,
    "rate_min": _NON_NEGATIVE,
    "s_max": _NON_NEGATIVE,
    "scale": _NON_NEGATIVE,
    "amplitude": _NON_NEGATIVE,
    "distance": _NON_NEGATIVE,
    "distances": _NON_NEGATIVE,
    "min_distance": _NON_NEGATIVE,
    "n_unprotected": _NON_NEGATIVE,
    "context_length": (lambda x: (x > 0) & x.isfinite(), "finite and > 0"),
    "max_protected": (lambda x: (x >= 1) & x.isfinite(), "finite and >= 1 (the own key counts)"),
    "p": (lambda x: (x > 0) & (x < 1), "in (0, 1)"),
    "depth": (lambda x: (x >= 0) & (x < 1), "in [0, 1)"),
}


def mask(i: Value, j: Value, rate: Value, landmark: Value) -> Value:
    """The paper's M = rate · (j·(1 − l) + i·l), non-negative for positions ≥ 0 (Proposition 1).

    It exceeds `relative_mask` by rate·i, one number per query, so the two give the same attention in real arithmetic.
    M grows with position, and low precision loses the differences that matter.
    """
    (i, j, rate, landmark), result = _operands(i=i, j=j, rate=rate, landmark=landmark)
    return result(rate * (j * (1 - landmark) + i * landmark))


def relative_mask(i: Value, j: Value, rate: Value, landmark: Value) -> Value:
    """The paper's M̂ = −rate · (1 − l) · (i − j), at most 0 for j ≤ i (Propositions 1 and 2)."""
    (i, j, rate, landmark), result = _operands(i=i, j=j, rate=rate, landmark=landmark)
    return result(-rate * (1 - landmark) * (i - j))


def landmark_threshold(i: Value, a: Value, b: Value, landmark_b: Value) -> Value:
    """Theorem 1: at positions a < b < i, M_ia > M_ib exactly when l_a exceeds this number.

    It needs rate > 0 and l_b < 1; at l_b = 1 the threshold is 1. It orders the masks, not the attention.

    Raises:
        ValueError: also for positions not in the order a < b < i.
    """
    (i, a, b, landmark_b), result = _operands(i=i, a=a, b=b, landmark_b=landmark_b)
    _require("a", a, a < b, "before b")
    _require("b", b, b < i, "before i")
    return result(((i - b) * landmark_b + (b - a)) / (i - a))


def unprotected_mass_bound(distances: Value, rate: Value, s_max: Value, landmark: Value = 0.0) -> Value:
    """Theorem 2: the attention on a set of keys is at most B = Σ exp(2·s_max − rate · (1 − l_k) · (i − k)).

    It is at most B/(1 + B) even, which some head attains; B bounds the distance of Corollary 1 as well. The last
    dimension of the broadcast arguments runs over the set's keys.

    Returns:
        B, the broadcast shape without it; 0 for an empty set, inf only where B exceeds the dtype.
    """
    (distances, rate, s_max, landmark), result = _operands(
        distances=distances, rate=rate, s_max=s_max, landmark=landmark
    )
    return result((2 * s_max - rate * (1 - landmark) * distances).logsumexp(-1).exp())


def unprotected_mass_bound_simple(min_distance: Value, rate: Value, s_max: Value, n_unprotected: Value) -> Value:
    """Theorem 2, simple form: n keys at min_distance or beyond hold at most n · exp(2·s_max − rate·min_distance).

    For keys with landmarks pass the smallest (1 − l_k)·(i − k) as min_distance.
    """
    (min_distance, rate, s_max, n_unprotected), result = _operands(
        min_distance=min_distance, rate=rate, s_max=s_max, n_unprotected=n_unprotected
    )
    # The count enters as a logarithm: an empty set gives 0 even where the exponential overflows.
    return result((n_unprotected.log() + 2 * s_max - rate * min_distance).exp())


def effective_context_length(rate: Value, s_max: Value, n_unprotected: Value, p: Value) -> Value:
    """Δ_eff = (2·s_max + log(n/p)) / rate: unprotected keys from this distance on hold at most p together.

    A key with landmark l has the horizon Δ_eff / (1 − l), see `visible`. n = 0 is treated as n = 1.

    Returns:
        The distance, > 0; inf where rate is 0.
    """
    (rate, s_max, n_unprotected, p), result = _operands(rate=rate, s_max=s_max, n_unprotected=n_unprotected, p=p)
    return result(_ratio(_tolerated_loss(s_max, n_unprotected, p), rate))


def visible(
    i: Value, j: Value, rate: Value, s_max: Value, n_unprotected: Value, p: Value, landmark: Value = 0.0
) -> bool | Tensor:
    """Visible up to p: (1 − l_j) · (i − j) · rate < 2·s_max + log(n/p). All other keys together hold at most p.

    l = 1 and the own key are always visible, and so are keys after the query, which the causal mask has to hide. The
    promise needs n not below the number of keys hidden.

    Returns:
        A bool, or a boolean tensor of the broadcast shape.
    """
    (i, j, rate, s_max, n_unprotected, p, landmark), result = _operands(
        i=i, j=j, rate=rate, s_max=s_max, n_unprotected=n_unprotected, p=p, landmark=landmark
    )
    inside = result((1 - landmark) * (i - j) * rate < _tolerated_loss(s_max, n_unprotected, p))
    return inside if isinstance(inside, Tensor) else bool(inside)


def logit_gap_bound(distance: Value, rate: Value, s_max: Value, landmark: Value = 0.0) -> Value:
    """Theorem 3: a_ii − a_ij ≥ rate · (1 − l_j) · (i − j) − 2·s_max, and some head attains it."""
    (distance, rate, s_max, landmark), result = _operands(distance=distance, rate=rate, s_max=s_max, landmark=landmark)
    return result(rate * (1 - landmark) * distance - 2 * s_max)


def gate_to_eliminate(
    distance: Value, s_max: Value, amplitude: Value, context_length: Value, landmark: Value = 0.0
) -> Value:
    """Theorem 3: every query gate above 2·s_max·T / (Γ · (i − j) · (1 − l_j)) puts a_ii above a_ij.

    It is the least gate that serves all scores within s_max. "Eliminate" means ranked below the own key, not removed.

    Returns:
        The gate; inf where distance, amplitude or 1 − l is 0, since no gate suffices.
    """
    (distance, s_max, amplitude, context_length, landmark), result = _operands(
        distance=distance, s_max=s_max, amplitude=amplitude, context_length=context_length, landmark=landmark
    )
    return result(_ratio(2 * s_max * context_length, amplitude * (1 - landmark) * distance))


def log_partition_bound(
    i: Value, rate: Value, rate_min: Value, s_max: Value, max_protected: Value, max_landmark: Value = 0.0
) -> Value:
    """Lemma 1: log Z_i ≤ s_max + rate·i + log(P + 1/(e^x − 1)), x = rate_min·(1 − max_landmark), Z_i under `mask`.

    P = max_protected ≥ 1 bounds the number of keys with a landmark above max_landmark, the own key counted. The term
    rate·i belongs to M: under `relative_mask` the bound is the same with i = 0. Keys stand at distinct whole positions.

    Returns:
        The logarithm of the lemma's bound; inf where rate_min·(1 − max_landmark) is 0.

    Raises:
        ValueError: also for rate_min above rate.
    """
    (i, rate, rate_min, s_max, max_protected, max_landmark), result = _operands(
        i=i, rate=rate, rate_min=rate_min, s_max=s_max, max_protected=max_protected, max_landmark=max_landmark
    )
    _require("rate_min", rate_min, rate_min <= rate, "at most rate")
    loss = rate_min * (1 - max_landmark)
    # 1/(e^x − 1) written with e^−x, which does not overflow.
    background = _ratio((-loss).exp(), -torch.expm1(-loss))
    return result(s_max + rate * i + (max_protected + background).log())


def retrieval_margin(i: Value, k: Value, rate: Value, landmark: Value) -> Value:
    """Proposition 3: a_ik > a_ii, the paper's retrieval, exactly if s_ik − s_ii exceeds rate · (i − k) · (1 − l_k)."""
    (i, k, rate, landmark), result = _operands(i=i, k=k, rate=rate, landmark=landmark)
    return result(rate * (i - k) * (1 - landmark))


def elimination_distance(rate_min: Value, s_max: Value, landmark: Value = 0.0) -> Value:
    """Corollary 2: from the distance 2·s_max / (rate_min·(1 − l)) on, no score lifts a key above the own key.

    Many such keys together can outweigh the own key. rate_min and s_max have to hold for all later queries.

    Returns:
        The distance; inf where rate_min·(1 − l) is 0.
    """
    (rate_min, s_max, landmark), result = _operands(rate_min=rate_min, s_max=s_max, landmark=landmark)
    return result(_ratio(2 * s_max, rate_min * (1 - landmark)))


def retrieval_limit(rate: Value, s_max: Value, depth: Value) -> Value:
    """Corollary 2: from the length 2·s_max / (rate·(1 − ρ)) on, a needle with l = 0 cannot beat the own key.

    Returns:
        The length i; inf where rate is 0.
    """
    (rate, s_max, depth), result = _operands(rate=rate, s_max=s_max, depth=depth)
    return result(_ratio(2 * s_max, rate * (1 - depth)))


def required_landmark(i: Value, depth: Value, rate: Value, s_max: Value) -> Value:
    """Corollary 2: from `retrieval_limit` on, a needle needs l_k > 1 − 2·s_max / (rate · i · (1 − ρ)).

    Necessary for beating the own key, sufficient only at the best score within s_max; see `retrieval_margin`.

    Returns:
        The landmark to exceed, in [0, 1]; 0 below the limit.
    """
    (i, depth, rate, s_max), result = _operands(i=i, depth=depth, rate=rate, s_max=s_max)
    _require("i", i, i >= 0, ">= 0")
    return result((1 - _ratio(2 * s_max, rate * i * (1 - depth))).clamp(min=0))


def score_bound(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """S_max = scale · max‖q‖ · max‖k‖, so that |scale · qᵀRk| ≤ S_max for every rotation R.

    Args:
        q: queries (…, Nq, D), floating, without the coordinates that carry the mask.
        k: keys (…, Nk, D), floating; leading dimensions broadcast with those of q.
        scale: softmax scale ≥ 0, usually 1/√(head dim, reserved coordinates included).

    Returns:
        (…), at least float32, the maximum over all queries and keys.

    Raises:
        ValueError: q or k without two dimensions, without rows or with different D, or a negative scale.
    """
    if q.dim() < 2 or k.dim() < 2 or q.shape[-1] != k.shape[-1] or 0 in (q.shape[-2], k.shape[-2]):
        raise ValueError(f"q and k must be (..., N >= 1, D) with the same D, got {tuple(q.shape)}, {tuple(k.shape)}")
    (q, k, factor), _ = _operands(q=q, k=k, scale=scale)
    longest_q: Tensor = torch.linalg.vector_norm(q, dim=-1).amax(-1)
    longest_k: Tensor = torch.linalg.vector_norm(k, dim=-1).amax(-1)
    return factor * longest_q * longest_k


def _tolerated_loss(s_max: Tensor, n_unprotected: Tensor, p: Tensor) -> Tensor:
    """2·s_max + log(n/p): a key that loses this many logits to distance holds at most p/n."""
    return 2 * s_max + (n_unprotected.clamp(min=1) / p).log()


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient for a denominator ≥ 0, inf where it is 0, without a division by 0 to spoil gradients."""
    positive = denominator > 0
    return torch.where(positive, numerator / torch.where(positive, denominator, 1.0), math.inf)


def _operands(**arguments: Value) -> tuple[list[Tensor], Callable[[Tensor], Value]]:
    """Arguments as tensors of one dtype, checked against `_DOMAINS`, and what turns the result into its type."""
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    floating = [x for x in tensors if x.is_floating_point()]
    # As in PyTorch, a zero-dimensional tensor does not widen the dtype of the others.
    deciding = [x.dtype for x in floating if x.dim()] or [x.dtype for x in floating]
    dtype = reduce(torch.promote_types, deciding, torch.float32) if deciding else torch.float64
    device = max(tensors, key=Tensor.dim).device if tensors else None
    operands = []
    for name, x in arguments.items():
        operand = x.to(dtype) if isinstance(x, Tensor) else torch.tensor(float(x), dtype=dtype, device=device)
        if name in _DOMAINS:
            inside, expected = _DOMAINS[name]
            _require(name, operand, inside(operand), expected)
        operands.append(operand)
    return operands, (lambda result: result) if tensors else Tensor.item


def _require(name: str, value: Tensor, valid: Tensor, expected: str) -> None:
    """Raise ValueError with the first offending element of `value` unless `valid` holds throughout."""
    if not bool(valid.all()):
        raise ValueError(f"{name} must be {expected}, got {value.broadcast_to(valid.shape)[~valid][0].item()}")
