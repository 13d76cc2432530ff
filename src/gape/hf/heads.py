"""Heads of models without gates: what their layers read, and how much attention each gives to what an answer repeats.

Shapes: N tokens, L layers, Hq / Hk query / key heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """L, Hq and Hk of a causal language model; a ValueError where it has gates or is of an unknown family."""
    if isinstance(model, InjectedModel):
        raise ValueError("model: got one with gates, expected one without; gape.hf.remove takes them out")
    family = family_of(model)
    modules = family.modules(model)
    n_heads, n_kv_heads, _ = family.layout.sizes(modules[0])
    return len(modules), n_heads, n_kv_heads


def read_layers(model: Any, ids: Tensor, read: Callable[[Any, Tensor, Any], None]) -> None:
    """Run a model on ids (B, N), and call `read(module, x, embeddings)` with what each attention layer gets."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        read(module, x, kwargs.get("position_embeddings"))

    modules = family_of(model).modules(model)
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        model.base_model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def head_scores(model: Any, texts: Sequence[tuple[Tensor, Sequence[int], int]]) -> Tensor:
    """The retrieval score of each key head, (L, Hk) from 0 to 1, float32 on the CPU.

    Of a query head: the attention that the queries which predict the answer's tokens give to the tokens that it
    repeats, summed over those tokens, mean over those queries and over texts. Of a key head: the largest of its query
    heads, text by text.

    Args:
        model: a causal language model without gates, in eval mode.
        texts: ids (N,) of a prompt and its answer, the numbers of the prompt's tokens that the answer repeats, and how
            many of the last tokens are the answer.

    Raises:
        ValueError: gates, or tokens that are not where they should be.
    """
    sizes(model)
    own = model.config._attn_implementation
    # Others would not tell their weights.
    model.set_attn_implementation("eager")
    try:
        return torch.stack([_text_scores(model, *text) for text in texts]).mean(0)
    finally:
        model.set_attn_implementation(own)


def _text_scores(model: Any, ids: Tensor, source: Sequence[int], answer: int) -> Tensor:
    """The scores (L, Hk) of one text."""
    first, places = len(ids) - answer, torch.tensor(sorted(set(source)))
    if answer < 1 or first < 1:
        raise invalid_argument("answer", answer, f"1 to {len(ids) - 1} tokens of {len(ids)}, behind a prompt")
    if not len(source) or min(source) < 0 or max(source) >= first:
        raise invalid_argument("source", list(source), f"numbers of tokens before the answer, from 0 to {first - 1}")
    ids, cache = ids[None].to(next(model.parameters()).device), None
    for start in range(0, first - 1, _PIECE):
        part = ids[:, start : min(start + _PIECE, first - 1)]
        cache = model.base_model(part, past_key_values=cache, use_cache=True).past_key_values
    # The query of a token predicts the next one; nothing is predicted from the last.
    queries = ids[:, first - 1 : -1]
    bare = [module for module in family_of(model).modules(model) if "forward" not in vars(module)]
    try:
        output = model.base_model(queries, past_key_values=cache, use_cache=True, output_attentions=True)
    finally:
        # Transformers 4 leaves it behind after output_attentions.
        for module in bare:
            vars(module).pop("forward", None)
    masses = torch.stack([_mass(weights[0], places, ids.size(1) - 1) for weights in output.attentions])
    layers, n_heads, n_kv_heads = sizes(model)
    return masses.view(layers, n_kv_heads, n_heads // n_kv_heads).amax(-1)


def _mass(weights: Tensor, places: Tensor, total: int) -> Tensor:
    """Attention (Hq, queries, keys) → (Hq,), on some of `total` tokens; a sliding window has the last keys only."""
    columns = places - (total - weights.size(-1))
    columns = columns[columns >= 0].to(weights.device)
    return weights.float()[..., columns].sum(-1).mean(-1).cpu()


def best(scores: Tensor, count: int) -> list[Head]:
    """The key heads with the highest scores (L, Hk), best first; of equal ones, the first come first."""
    places = scores.flatten().argsort(descending=True, stable=True)[:count].tolist()
    return [divmod(place, scores.size(1)) for place in places]
