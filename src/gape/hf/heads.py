"""Retrieval heads: how much attention each key head gives to the text that an answer repeats.

Shapes: N tokens, L layers, Hq / Hk query / key heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gape.hf.families import family_of
from gape.hf.save_load import InjectedModel
from gape.utils.validation import invalid_argument

#: Tokens of a prompt that go through the model at once; `eager` makes a weight for each of them and each key.
_PIECE = 1024

#: Number of a layer and of a key head in it.
Head = tuple[int, int]


def sizes(model: Any) -> tuple[int, int, int]:
    """L, Hq and Hk of a causal language model without gates.

    Raises:
        ValueError: it has gates, or is of an unknown family.
    """
    if isinstance(model, InjectedModel):
        raise ValueError("model: got one with gates, expected one without; gape.hf.remove takes them out")
    family = family_of(model)
    modules = family.modules(model)
    n_heads, n_kv_heads, _ = family.layout.sizes(modules[0])
    return len(modules), n_heads, n_kv_heads


@torch.no_grad()
def scores(model: Any, ids: Tensor, source: Sequence[int], answer: Sequence[int]) -> Tensor:
    """How much attention each key head gives to the text that an answer repeats.

    Of a query head: the attention that the queries which predict the answer's tokens give to the tokens of `source`,
    summed over those tokens, mean over those queries. Of a key head: the largest of its query heads.

    Args:
        model: a causal language model without gates, in eval mode, loaded with attn_implementation="eager".
        ids: (1, N), a prompt and its answer, on the model's device.
        source: numbers of the tokens of the prompt that the answer repeats.
        answer: numbers of the answer's tokens, the last of `ids`.

    Returns:
        (L, Hk), float32, on the CPU; each from 0 to 1.

    Raises:
        ValueError: gates, another attention, or tokens that are not where they should be.
    """
    layers, n_heads, n_kv_heads = sizes(model)
    if model.config._attn_implementation != "eager":
        raise invalid_argument(
            "model", model.config._attn_implementation, "attn_implementation='eager', which tells weights"
        )
    first, places = _checked(ids, source, answer)
    cache = None
    for start in range(0, first - 1, _PIECE):
        part = ids[:, start : min(start + _PIECE, first - 1)]
        cache = model.base_model(part, past_key_values=cache, use_cache=True).past_key_values
    # The query of a token predicts the next one; nothing is predicted from the last.
    queries = ids[:, first - 1 : -1]
    with _own_forwards(family_of(model).modules(model)):
        output = model.base_model(queries, past_key_values=cache, use_cache=True, output_attentions=True)
    total = first - 1 + queries.size(1)
    masses = torch.stack([_mass(weights[0], places, total) for weights in output.attentions])
    return masses.view(layers, n_kv_heads, n_heads // n_kv_heads).amax(-1)


@contextmanager
def _own_forwards(modules: Sequence[Any]) -> Iterator[None]:
    """Remove what transformers 4 leaves in modules after output_attentions: a `forward` attribute."""
    bare = [module for module in modules if "forward" not in vars(module)]
    try:
        yield
    finally:
        for module in bare:
            vars(module).pop("forward", None)


def _checked(ids: Tensor, source: Sequence[int], answer: Sequence[int]) -> tuple[int, Tensor]:
    """The number of the answer's first token, and the source as numbers, rising, each once."""
    if ids.dim() != 2 or ids.size(0) != 1:
        raise invalid_argument("ids", ids, "(1, N)")
    count = ids.size(1)
    if not len(answer) or list(answer) != list(range(count - len(answer), count)) or answer[0] < 1:
        raise invalid_argument(
            "answer", list(answer), f"the numbers of the last tokens, up to {count - 1}, behind a prompt"
        )
    first = answer[0]
    if not len(source) or min(source) < 0 or max(source) >= first:
        raise invalid_argument("source", list(source), f"numbers of tokens before the answer, from 0 to {first - 1}")
    return first, torch.tensor(sorted(set(source)))


def _mass(weights: Tensor, places: Tensor, total: int) -> Tensor:
    """Attention (Hq, queries, keys) → (Hq,), on some of `total` tokens; a sliding window has the last keys only."""
    columns = places - (total - weights.size(-1))
    columns = columns[columns >= 0].to(weights.device)
    return weights.float()[..., columns].sum(-1).mean(-1).cpu()


def best(scores: Tensor, count: int) -> list[Head]:
    """The key heads with the highest scores (L, Hk), best first; of equal ones, the first come first."""
    places = scores.flatten().argsort(descending=True, stable=True)[:count].tolist()
    return [divmod(place, scores.size(1)) for place in places]
