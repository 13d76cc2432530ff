"""Masks and positions of `transformers`: which tokens a query may attend to, and which tokens are pads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from gape.utils.validation import invalid_argument

Value = TypeVar("Value")
#: Rows of a mask that are compared at once.
ROWS = 1024
#: Versions of `transformers` differ in the arguments that they take.
_MASK_ARGUMENTS = frozenset(inspect.signature(create_causal_mask).parameters)


def causal_mask(
    config: Any, embeddings: Tensor, real: Tensor | None, positions: Tensor, past_key_values: Any = None
) -> Any:
    """The mask that `transformers` gives to attention layers, whose implementation the config says.

    `embeddings` (B, N, E) say sizes and dtype, `real` (B, cached + N) is 0 for pads, positions are (N,) or (B, N).
    """
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    arguments = {
        "config": config,
        "inputs_embeds": embeddings,
        "input_embeds": embeddings,
        "attention_mask": real,
        "cache_position": torch.arange(embeddings.size(1), device=embeddings.device) + past,
        "past_key_values": past_key_values,
        "position_ids": positions if positions.dim() == 2 else positions.unsqueeze(0),
    }
    return create_causal_mask(**{key: value for key, value in arguments.items() if key in _MASK_ARGUMENTS})


def first_keys(mask: Any, n_k: int) -> Tensor:
    """A mask (.., Nq, at least Nk) cut to its first n_k keys; a ValueError for another kind of mask."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        expected = "a tensor (batch, heads, queries, keys), as sdpa, eager, gape, … make it"
        raise invalid_argument("attention_mask", mask, expected)
    # The same tensor where nothing is cut off, so that what is memoized on it is not lost.
    return mask if mask.size(-1) == n_k else mask[..., :n_k]


def as_bool(mask: Tensor) -> Tensor:
    """A bool or additive mask as a bool one, True may attend."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def visibility(q_positions: Tensor, k_positions: Tensor | None, mask: Tensor | None, n_q: int) -> dict[str, Any]:
    """Which query may attend to which key, as arguments of the operator.

    The mask is bool, or None where causality by index is all. Without positions of keys the mask says everything.
    """
    explicit: dict[str, Any] = {"q_positions": q_positions, "k_positions": k_positions}
    if k_positions is None:
        explicit = {"is_causal": False}
    if mask is not None:
        return {**explicit, "attn_mask": mask}
    if n_q == 1:
        # The only query attends to every key; without causality, positions cost no mask.
        return {**explicit, "is_causal": False}
    # No mask and as many keys as queries: the keys are these tokens.
    if k_positions is None or consecutive(q_positions):
        return {}
    if rising(q_positions):
        # Causality by position is that by index, and kernels need no mask for it.
        return explicit
    index = torch.ones(n_q, n_q, dtype=torch.bool, device=q_positions.device).tril()
    return {"q_positions": q_positions, "k_positions": q_positions, "attn_mask": index}


def is_next_chunk(q_positions: Tensor, k_positions: Tensor | None, mask: Tensor) -> bool:
    """Whether positions of keys (.., Nk) rise by one, the queries are the last of them, and a bool mask is causal only.

    False in a compiled graph, which cannot read values.
    """
    if k_positions is None or torch.compiler.is_compiling() or not consecutive(k_positions):
        return False
    last = k_positions[..., -mask.size(-2) :]
    return torch.equal(q_positions.expand_as(last), last) and _lower_right(mask)


def _lower_right(mask: Tensor) -> bool:
    """Whether a bool mask (.., Nq, Nk) is causality by index, the queries being the last keys."""
    everything = torch.ones(mask.size(-1), dtype=torch.bool, device=mask.device)
    return memoized(mask, "_gape_lower_right", lambda: not _hides_more(mask, everything))


def real_tokens(mask: Tensor | None, n: int, batch: int) -> Tensor | None:
    """Which of the last n tokens are no pads, bool (B, n), by a mask of `transformers`; None: all are.

    The mask is bool or additive (B or 1, 1, n, keys), or None. It is refused where it hides more than pads on the left
    and later tokens.
    """
    if mask is None:
        return None
    if mask.dim() != 4 or mask.size(1) != 1 or mask.size(-2) != n:
        raise invalid_argument("attention_mask", mask, f"(batch, 1, {n}, keys), as transformers makes it")
    # Detached, for a view of a tensor that refers to it is never freed.
    real = memoized(mask, "_gape_real_tokens", lambda: _real_tokens(mask.detach()[:, 0]))
    return None if real is None else real.expand(batch, -1)


def _real_tokens(mask: Tensor) -> Tensor | None:
    """As :func:`real_tokens`, of a mask (B or 1, n, keys)."""
    real = as_bool(mask[:, -1])
    if _hides_more(mask, real):
        raise ValueError("attention_mask: hides more than pads and later tokens, which would void the proof")
    refuse_pads_behind(real)
    return None if bool(real.all()) else real[:, -mask.size(-2) :]


def refuse_pads_behind(real: Tensor) -> None:
    """Refuse pads behind a token, by a mask of real tokens (B, N): caches that attend themselves need left padding."""
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError("attention_mask: got pads behind a token, expected padding on the left")


def _hides_more(mask: Tensor, real: Tensor) -> bool:
    """Whether a mask (.., Nq, Nk) is other than causality by index over real keys (.., Nk), for queries that are real.

    The queries are the last keys.
    """
    n_q, n_k = mask.shape[-2:]
    index = torch.arange(n_k, device=mask.device)
    wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    for start in range(0, n_q, ROWS):
        rows = slice(start, min(start + ROWS, n_q))
        own = slice(rows.start + n_k - n_q, rows.stop + n_k - n_q)
        expected = (index <= index[own, None]) & real[..., None, :]
        wrong |= (real[..., own, None] & (as_bool(mask[..., rows, :]) != expected)).any()
    return bool(wrong)


def consecutive(positions: Tensor) -> bool:
    """Whether positions (N,) or (B, N) rise by one, so that distance by index is distance by position.

    False in a compiled graph, which cannot read values.
    """
    return _all_steps(positions, "_gape_consecutive", lambda steps: steps == 1)


def rising(positions: Tensor) -> bool:
    """Whether positions (N,) or (B, N) only rise: one document, parts of which may be skipped; False in a graph."""
    return _all_steps(positions, "_gape_rising", lambda steps: steps >= 1)


def _all_steps(positions: Tensor, name: str, allowed: Callable[[Tensor], Tensor]) -> bool:
    if torch.compiler.is_compiling():
        return False
    return memoized(positions, name, lambda: bool(allowed(positions.diff(dim=-1)).all()))


def memoized(tensor: Tensor, name: str, compute: Callable[[], Value]) -> Value:
    """What `compute` says of a tensor, stored in its attribute `name` until the tensor is written to."""
    # Tensors of inference mode have no version, so it is computed each time.
    version = None if tensor.is_inference() else tensor._version
    stored: tuple[int | None, Value] | None = getattr(tensor, name, None)
    if stored is None or version is None or stored[0] != version:
        stored = (version, compute())
        setattr(tensor, name, stored)
    return stored[1]
