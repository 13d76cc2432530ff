"""Heads that retrieve: those whose queries look at the text that an answer repeats, and floors that spare them.

Shapes: N tokens, L layers, Hq / Hk query / key heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gape.hf.families import family_of
from gape.hf.saving import Saved
from gape.ops.checks import positive_number, refuse, whole

#: Tokens of a prompt that go through the model at once; `eager` makes a weight for each of them and each key.
_PIECE = 1024


def sizes(model: Any) -> tuple[int, int, int]:
    """L, Hq and Hk of a causal language model without gates.

    Raises:
        ValueError: it has gates, or is of a family that is not known here.
    """
    if isinstance(model, Saved):
        raise ValueError("model: got one with gates, expected one without; gape.hf.remove takes them out")
    family = family_of(model)
    modules = family.modules(model)
    n_heads, n_kv_heads, _ = family.layout.sizes(modules[0])
    return len(modules), n_heads, n_kv_heads


@torch.no_grad()
def scores(model: Any, ids: Tensor, source: Sequence[int], answer: Sequence[int]) -> Tensor:
    """How much each key head is looked at where a text has what an answer repeats.

    Of a query head: the attention that the queries which predict the answer's tokens give to the tokens of `source`,
    summed over those tokens, mean over those queries. Of a key head: the largest of its query heads.

    Args:
        model: a causal language model without gates, in eval mode, loaded with attn_implementation="eager".
        ids: (1, N), a prompt and its answer, on the model's device.
        source: numbers of the tokens at which the answer stands in the prompt.
        answer: numbers of the answer's tokens, the last of `ids`.

    Returns:
        (L, Hk), float32, on the CPU; each from 0 to 1.

    Raises:
        ValueError: gates, another attention, or tokens that are not where they should be.
    """
    layers, n_heads, n_kv_heads = sizes(model)
    if model.config._attn_implementation != "eager":
        raise refuse("model", model.config._attn_implementation, "attn_implementation='eager', which tells weights")
    first, places = _checked(ids, source, answer)
    cache = None
    for start in range(0, first - 1, _PIECE):
        part = ids[:, start : min(start + _PIECE, first - 1)]
        cache = model.base_model(part, past_key_values=cache, use_cache=True).past_key_values
    # The query of a token predicts the next one; nothing is predicted from the last.
    asked = ids[:, first - 1 : -1]
    found = model.base_model(asked, past_key_values=cache, use_cache=True, output_attentions=True).attentions
    seen = first - 1 + asked.size(1)
    of_queries = torch.stack([_mass(weights[0], places, seen) for weights in found])
    return of_queries.view(layers, n_kv_heads, n_heads // n_kv_heads).amax(-1)


def _checked(ids: Tensor, source: Sequence[int], answer: Sequence[int]) -> tuple[int, Tensor]:
    """The number of the answer's first token, and the source as numbers, rising, each once."""
    if ids.dim() != 2 or ids.size(0) != 1:
        raise refuse("ids", ids, "(1, N)")
    count = ids.size(1)
    if not len(answer) or list(answer) != list(range(count - len(answer), count)) or answer[0] < 1:
        raise refuse("answer", list(answer), f"the numbers of the last tokens, up to {count - 1}, behind a prompt")
    if not len(source) or min(source) < 0 or max(source) >= answer[0]:
        raise refuse("source", list(source), f"numbers of tokens before the answer, from 0 to {answer[0] - 1}")
    return answer[0], torch.tensor(sorted(set(source)))


def _mass(weights: Tensor, places: Tensor, seen: int) -> Tensor:
    """Attention (Hq, queries, keys) → (Hq,), on some of the `seen` tokens; a sliding window has the last keys only."""
    columns = places - (seen - weights.size(-1))
    columns = columns[columns >= 0].to(weights.device)
    return weights.float()[..., columns].sum(-1).mean(-1).cpu()


def floors(scores: Tensor, free: int, floor: float, groups: int) -> list[list[float]]:
    """Floors under the gates for :func:`gape.hf.inject` that leave the heads with the highest scores free.

    Args:
        scores: (L, Hk), those of a sample or the mean over several; of equal ones, the first come first.
        free: how many key heads have floor 0.
        floor: of all others.
        groups: query heads of a key head.

    Returns:
        A list for each layer with a number for each query head: gates={"gate_floor": …}.

    Raises:
        ValueError: a value out of range; names it.
    """
    if scores.dim() != 2 or not bool(scores.isfinite().all()):
        raise refuse("scores", scores, "finite numbers, (layers, key heads)")
    high = positive_number("floor", floor)
    if whole("free", free, 0) > scores.numel():
        raise refuse("free", free, f"a whole number from 0 to {scores.numel()}, the key heads of the model")
    whole("groups", groups)
    best = scores.flatten().argsort(descending=True, stable=True)[:free]
    made = torch.full((scores.numel(),), high, dtype=torch.float64)
    made[best.cpu()] = 0.0
    rows: list[list[float]] = made.view(scores.shape).repeat_interleave(groups, dim=1).tolist()
    return rows
