"""GPT-2's learned absolute positions: limited to what was learned, replaced, or extended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gape.hf.families import TRANSFORMERS_4
from gape.utils.validation import invalid_argument, whole


class NoPositions(nn.Module):
    """Replaces a table of positions and adds nothing, (B, N) → (B, N, 1)."""

    def forward(self, positions: Tensor) -> Tensor:
        """Zeros in the dtype of the positions; adding integers does not change the dtype of embeddings."""
        return torch.zeros_like(positions).unsqueeze(-1)


class LimitedPositions(nn.Embedding):
    """A table of positions with an error that says what to do beyond its end."""

    def forward(self, positions: Tensor) -> Tensor:
        """positions (B, N) → (B, N, E); beyond the table a ValueError."""
        far = not torch.compiler.is_compiling() and positions.numel() and int(positions.max()) >= self.num_embeddings
        if far:
            raise invalid_argument("position_ids", positions, longer_positions(self.num_embeddings))
        return super().forward(positions)


def longer_positions(limit: int) -> str:
    """What can be done beyond the last learned position, for messages."""
    return (
        f"at most {limit} tokens, as many as the model has learned positions for. To go further: position='rope+gape' "
        "(rotate instead, then fine-tune), position='nope+gape' (no positions but the gates), or "
        "gape.hf.extend_positions(model, n) (a longer table)"
    )


def limit(model: Any) -> int | None:
    """Positions that a GPT-2 has learned; None once they are replaced."""
    return getattr(model.transformer.wpe, "num_embeddings", None)


def extend_positions(model: Any, length: int) -> Any:
    """Lengthen a GPT-2's table of positions, in place: its rows stay, and new ones repeat them from the first on.

    Args:
        model: a GPT2LMHeadModel, before or after gates were put in; it is returned.
        length: positions in all.

    Raises:
        ValueError: no learned positions, or a length below theirs.
    """
    table = getattr(getattr(model, "transformer", None), "wpe", None)
    if not isinstance(table, nn.Embedding):
        raise invalid_argument("model", type(model).__name__, "a GPT-2 with learned positions")
    if whole("length", length) < table.num_embeddings:
        raise invalid_argument("length", length, f"at least {table.num_embeddings}, the positions there are")
    rows = torch.arange(length, device=table.weight.device) % table.num_embeddings
    learns = table.weight.requires_grad
    table.weight = nn.Parameter(table.weight.detach()[rows].clone(), requires_grad=learns)
    table.num_embeddings = length
    model.config.n_positions = length
    return model


def limit_positions(model: Any, *, replaced: bool) -> dict[str, Any]:
    """Limit a GPT-2's table of positions, or remove it; returns what :func:`restore_positions` needs."""
    transformer = model.transformer
    # Transformers 4 does not pass positions to the blocks.
    hooks = [transformer.register_forward_pre_hook(_pass_positions, with_kwargs=True)] if TRANSFORMERS_4 else []
    table = transformer.wpe
    if replaced:
        transformer.wpe = NoPositions()
    else:
        table.__class__ = LimitedPositions
    return {"hooks": hooks, "table": table}


def restore_positions(model: Any, undo: dict[str, Any]) -> None:
    """Put the table of positions back; refused where the model was loaded without it."""
    table = undo["table"]
    if undo.get("loaded") and isinstance(model.transformer.wpe, NoPositions):
        raise ValueError("model: it was saved without its learned positions, which cannot be put back")
    table.__class__ = nn.Embedding
    # A removed table did not follow the model to another device or dtype.
    words = model.transformer.wte.weight
    model.transformer.wpe = table.to(device=words.device, dtype=words.dtype)


def _pass_positions(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = kwargs.get("position_ids")
    return (args, kwargs) if positions is None else (args, {**kwargs, "gape_position_ids": positions})
