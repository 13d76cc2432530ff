"""The drop-in attention layer: project, turn, remember, attend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gape import positions as schemes
from gape.gates import GAPEGates
from gape.models.cache import KVCache
from gape.ops import available_implementations, checks
from gape.ops.carried import carried_attention, carried_form, carry
from gape.ops.checks import refuse


class GAPEAttention(nn.Module):
    """Causal self-attention under any positional scheme, (B, N, E) → (B, N, E).

    Args:
        n_embd: width E, a multiple of n_heads; a head is E / n_heads wide.
        n_heads: query heads.
        n_kv_heads: key and value heads, a divisor of n_heads; n_heads when None.
        context_length: T, the training length: a number that is saved with the model, never read off a batch.
        position: a name of :func:`gape.positions.available`.
        reserve: coordinates of each head's q and k given up for the bias, so that it fits into the head dim
            (6 for `split`, 2 for the paper's `rank2`, 0 lets the head dim grow instead). By default 6 for gated
            schemes and 0 for others. The softmax scale is always that of the full head. Where the bias fits, cached
            keys carry it and nothing is stored beside them.
        bias: whether the projections have biases.
        impl: which implementation of the gated operator runs.
        **options: options of the scheme and of its gates, such as theta, fraction or gate_floor.

    Attributes:
        keep_landmark: whether a forward pass leaves the mean landmark of its keys, with its gradient, in
        landmark_mean: a tensor of one number, else None.

    Raises:
        ValueError: for sizes that do not fit together, an unknown scheme or option; names the argument.
    """

    def __init__(
        self,
        n_embd: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        context_length: float,
        position: str = "p-rope+gape",
        reserve: int | None = None,
        bias: bool = False,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        n_embd, n_heads = checks.whole("n_embd", n_embd), checks.whole("n_heads", n_heads)
        if n_embd % n_heads:
            raise refuse("n_embd", n_embd, f"a multiple of n_heads = {n_heads}")
        n_kv_heads = n_heads if n_kv_heads is None else checks.whole("n_kv_heads", n_kv_heads)
        if n_heads % n_kv_heads:
            raise refuse("n_kv_heads", n_kv_heads, f"a divisor of n_heads = {n_heads}")
        if impl not in ("auto", *available_implementations()):
            raise refuse("impl", impl, f"'auto' or one of {available_implementations()}")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, n_embd // n_heads
        self.reserve = reserved(position, self.head_dim, reserve)
        self.content_dim = self.head_dim - self.reserve
        self.scale = self.head_dim**-0.5
        self.impl = impl
        self.position = position
        self.context_length = context_length
        self.scheme = schemes.build(
            position,
            n_heads=n_heads,
            head_dim=self.content_dim,
            n_kv_heads=n_kv_heads,
            context_length=context_length,
            n_embd=n_embd,
            **options,
        )
        self._widths = [n_heads * self.content_dim, n_kv_heads * self.content_dim, n_kv_heads * self.head_dim]
        self.qkv = nn.Linear(n_embd, sum(self._widths), bias=bias)
        self.out = nn.Linear(n_embd, n_embd, bias=bias)
        self.keep_landmark = False
        self.landmark_mean: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections as a GPT does: normal, standard deviation 0.02, no bias."""
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: (B, N, E).
            positions: integer (N,) or (B, N); None counts on from what is cached, from 0 without a cache.
            documents: integer (B, N): only equal ids see each other. Give pads an id of their own.
            cache: what earlier calls left; these tokens are added to it. For inference.
            attn_mask: bool, broadcastable to (B, heads, N, cached + N); True may attend.

        Returns:
            (B, N, E).
        """
        past = 0 if cache is None else cache.length
        batch, n = self._checked(x, positions, documents, cache, attn_mask)
        q, k, v = (
            y.view(batch, n, heads, width).transpose(1, 2)
            for y, (heads, width) in zip(self.qkv(x).split(self._widths, dim=-1), self._heads, strict=True)
        )
        where = torch.arange(past, past + n, device=x.device) if positions is None else positions
        q, gate = self.scheme.queries(q, where, x)
        k, side = self.scheme.keys(k, where, x, None if cache is None else cache.side)
        kept = self.keep_landmark and side is not None and self.gates is not None
        self.landmark_mean = GAPEGates.landmark_penalty(side) if kept and side is not None else None
        seen = {"q_positions": positions, "q_documents": documents, "attn_mask": attn_mask}
        if cache is None:
            seen |= {"k_positions": positions, "k_documents": documents}
            y = self.scheme.attend(q, k, v, gate, side, scale=self.scale, impl=self.impl, **seen)
        else:
            y = self._attend_cached(q, k, v, gate, side, where, cache, seen)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, n, self.n_heads * self.head_dim))
        return projected

    def _attend_cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        side: Tensor | None,
        where: Tensor,
        cache: KVCache,
        seen: dict[str, Tensor | None],
    ) -> Tensor:
        """Add the tokens at positions `where` to the cache and attend to all that it holds."""
        gates, form = self.gates, carried_form(self.impl, self.reserve, k)
        told = (seen["q_positions"], seen["q_documents"])
        if gates is None or gate is None or side is None or form is None:
            kept = cache.append(k, v, side, *told)
            seen |= {"k_positions": kept.positions, "k_documents": kept.documents}
            return self.scheme.attend(q, kept.k, kept.v, gate, kept.side, scale=self.scale, impl=self.impl, **seen)
        k = carry(k, side, where, form=form, context_length=self.context_length, width=self.head_dim)
        kept = cache.append(k, v, None, *told)
        seen |= {"k_positions": kept.positions, "k_documents": kept.documents}
        return carried_attention(
            q, kept.k, kept.v, gate, gates.amplitude, where,
            form=form, context_length=self.context_length, scale=self.scale, **seen,
        )  # fmt: skip

    @property
    def gates(self) -> GAPEGates | None:
        """The gates of a `+gape` scheme, None under others."""
        return self.scheme.gates if isinstance(self.scheme, schemes.Gated) else None

    @property
    def _heads(self) -> tuple[tuple[int, int], ...]:
        """(heads, width) of q, k and v."""
        return (
            (self.n_heads, self.content_dim),
            (self.n_kv_heads, self.content_dim),
            (self.n_kv_heads, self.head_dim),
        )

    def _checked(
        self,
        x: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: KVCache | None,
        attn_mask: Tensor | None,
    ) -> tuple[int, int]:
        """Refuse what would break off later, when the cache has been written to; (batch, tokens)."""
        weight = self.qkv.weight
        if not isinstance(x, Tensor) or x.dim() != 3 or x.size(2) != weight.size(1) or not x.is_floating_point():
            raise refuse("x", x, f"a floating tensor (batch, tokens, {weight.size(1)})")
        if cache is not None and not isinstance(cache, KVCache):
            raise refuse("cache", cache, "a KVCache")
        if cache is not None and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            raise ValueError("cache: what is cached carries no gradient, expected torch.no_grad() around the call")
        batch, n, _ = x.shape
        past = 0 if cache is None else cache.length
        checks.positions("positions", positions, batch, n, x.device)
        checks.documents("documents", documents, batch, n, x.device)
        checks.mask(attn_mask, (batch, self.n_heads, n, past + n), x.device)
        return batch, n

    def extra_repr(self) -> str:
        """Sizes and scheme, for repr()."""
        return f"position={self.position!r}, heads={self.n_heads}/{self.n_kv_heads}, reserve={self.reserve}"


def reserved(position: str, head_dim: int, reserve: int | None = None) -> int:
    """Coordinates of a head that are given up for the bias: `reserve`, or its default for the scheme.

    Raises:
        ValueError: unknown scheme, or no coordinate would be left.
    """
    if reserve is None:
        # A head too narrow to give coordinates up grows instead.
        return 6 if schemes.is_gated(position) and head_dim > 6 else 0
    if isinstance(reserve, bool) or not isinstance(reserve, int) or not 0 <= reserve < head_dim:
        raise refuse("reserve", reserve, f"a whole number from 0 to {head_dim - 1}, the head dim less one")
    return reserve
