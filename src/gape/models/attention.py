"""The drop-in attention layer, under any positional scheme."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape import positions as schemes
from gape.cache.kv import KVCache
from gape.cache.layer import PagedLayer
from gape.gates import GAPEGates
from gape.models.attention_steps import QKV, Embeddings, attend_layer, last, take_steps
from gape.models.skipping import Skips
from gape.ops import Plan, available_implementations, explain, inputs, prologue
from gape.ops.api import explain_fused
from gape.ops.implementations import FusedChoice, choose_fused
from gape.ops.inputs import learning, working_dtype
from gape.ops.prologue import OnePass, Projection, Step
from gape.positions.base import Side, counted
from gape.utils import validation
from gape.utils.validation import invalid_argument


class GAPEAttention(Skips, nn.Module):
    """Causal self-attention under any positional scheme, (B, N, E) → (B, N, E).

    Args:
        n_embd: width E, a multiple of n_heads; a head is E / n_heads wide.
        n_heads, n_kv_heads: query heads, and key and value heads, a divisor of them; as many when None.
        context_length: T, the training length: a number that is saved with the model, never read off a batch.
        position: a name of :func:`gape.positions.available`.
        reserve: coordinates of each head's q and k given up for the bias, so that it fits into the head dim
            (6 for `split`, 2 for the paper's `rank2`, 0 lets the head dim grow instead). By default 6 for gated
            schemes and 0 for others. The softmax scale is always that of the full head.
        bias: whether the projections have biases.
        impl: which implementation of the gated operator runs.
        **options: options of the scheme and of its gates, such as theta, fraction or gate_floor.

    Attributes:
        keep_landmark: whether a forward pass leaves the mean landmark of its keys, with its gradient, in
        landmark_mean: a tensor of one number, else None.
        stepwise: whether a forward pass takes the scheme's steps one by one, so that others can listen to them, also
            where a GPU runs them in one pass.

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
        n_embd, n_heads = validation.whole("n_embd", n_embd), validation.whole("n_heads", n_heads)
        if n_embd % n_heads:
            raise invalid_argument("n_embd", n_embd, f"a multiple of n_heads = {n_heads}")
        n_kv_heads = n_heads if n_kv_heads is None else validation.whole("n_kv_heads", n_kv_heads)
        if impl not in ("auto", *available_implementations()):
            raise invalid_argument("impl", impl, f"'auto' or one of {available_implementations()}")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, n_embd // n_heads
        self.reserve = reserved(position, self.head_dim, reserve)
        self.content_dim = self.head_dim - self.reserve
        self.scale = self.head_dim**-0.5
        self.impl = impl
        self.position = position
        self.context_length = context_length
        self.scheme = schemes.build(
            position, n_heads=n_heads, head_dim=self.content_dim, n_kv_heads=n_kv_heads, context_length=context_length,
            n_embd=n_embd, **options,
        )  # fmt: skip
        self._widths = [n_heads * self.content_dim, n_kv_heads * self.content_dim, n_kv_heads * self.head_dim]
        self.qkv = nn.Linear(n_embd, sum(self._widths), bias=bias)
        self.out = nn.Linear(n_embd, n_embd, bias=bias)
        self.keep_landmark = False
        self.landmark_mean: Tensor | None = None
        self.stepwise = False
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
        cache: KVCache | PagedLayer | None = None,
        attn_mask: Tensor | None = None,
        keep: int = 0,
    ) -> Tensor:
        """Attend.

        Args:
            x: (B, N, E).
            positions: integer (N,) or (B, N); None counts on from what is cached, from 0 without a cache.
            documents: integer (B, N): only equal ids see each other. Give pads an id of their own; with a cache in
                pages the only ids are 0 for pads, which stand on the left, and 1.
            cache: what earlier calls left; these tokens are added to it. For inference.
            attn_mask: bool, broadcastable to (B, heads, N, cached + N); True may attend.
            keep: answer the last so many tokens only, the others being keys and values; 0 answers all.

        Returns:
            (B, N or keep, E).
        """
        n = self._checked(x, positions, documents, cache, attn_mask, keep)
        self.landmark_mean = None
        if keep and (self.stepwise or isinstance(cache, PagedLayer)):
            # Whoever listens gets every query, and a paged cache needs the bounds of all of them.
            return self.forward(x, positions, documents, cache, attn_mask)[:, n - keep :]
        plain = positions is None and documents is None and attn_mask is None and cache is None
        fused = self._fused_prologue(x) if plain and keep in (0, n) else None
        if fused is not None:
            given, eps = self._fused_arguments(x, *fused), self.how(n).get("eps", 0.0)
            return self.merge(fused[0].fused.run(*given, scale=self.scale, eps=eps))
        return attend_layer(self, x, **self._steps(x, positions, documents, cache, attn_mask, keep or n))[0]

    def _steps(
        self,
        x: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: KVCache | PagedLayer | None,
        attn_mask: Tensor | None,
        queries: int,
    ) -> dict[str, Any]:
        """The arguments of :func:`gape.models.attention_steps.take_steps` besides the layer and x."""
        past, n = 0 if cache is None else cache.length, x.size(1)
        real = documents != 0 if isinstance(cache, PagedLayer) and documents is not None else None
        in_order = positions is None
        if positions is None:
            # Layers of a call with a cache share the tensor, and angles made of it.
            positions = torch.arange(n, device=x.device) if cache is None else counted(past, n, x.device)
        return {
            "positions": positions, "cache": cache, "queries": queries, "in_order": in_order, "documents": documents,
            "real": real, "attn_mask": _rows(attn_mask, queries),
        }  # fmt: skip

    def project(self, x: Tensor, queries: int | None = None) -> QKV:
        """k (B, Hk, N, C) and v (B, Hk, N, D) of all tokens, and q (B, H, queries, C) of the last, or of all."""
        n = x.size(1)
        queries = n if queries is None else queries
        if queries == n or not self._bare:
            parts = list(torch.split(self.qkv(x), self._widths, dim=-1))
            parts[0] = parts[0][:, n - queries :]
        else:
            cut, weight, bias = self._widths[0], self.qkv.weight, self.qkv.bias
            q = F.linear(x[:, n - queries :], weight[:cut], None if bias is None else bias[:cut])
            kv = F.linear(x, weight[cut:], None if bias is None else bias[cut:])
            parts = [q, *torch.split(kv, self._widths[1:], dim=-1)]
        return self._in_heads(parts, self.content_dim)

    def _in_heads(self, parts: Sequence[Tensor], width: int) -> QKV:
        """q (B, H, N, width), k (B, Hk, N, width) and v (B, Hk, N, D) from parts (B, N, heads · width)."""
        sizes = ((self.n_heads, width), (self.n_kv_heads, width), (self.n_kv_heads, self.head_dim))
        q, k, v = (x.reshape(*x.shape[:2], *size).transpose(1, 2) for x, size in zip(parts, sizes, strict=True))
        return q, k, v

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, x: Tensor, embeddings: Embeddings = None, past: Side = None
    ) -> tuple[Tensor, Tensor, Side, Side]:
        """Rotated q and k, each with the number per head and token that the scheme needs to attend."""
        n = q.size(2)
        q, gate = self.scheme.queries(q, last(positions, n), x if x.size(1) == n else x[:, x.size(1) - n :])
        k, side = self.scheme.keys(k, positions, x, past)
        if self.keep_landmark and side is not None and self.gates is not None:
            self.landmark_mean = side.mean()
        return q, k, gate, side

    def step(self, q: Tensor, positions: Tensor, embeddings: Embeddings = None) -> Step | None:
        """What :meth:`rotate` does to tokens at `positions`, for kernels; None where it is more than they do."""
        if not isinstance(self.scheme, schemes.Gated) or self.stepwise or self.keep_landmark:
            return None
        return self.scheme.step(positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Side, side: Side, **visibility: Any) -> tuple[Tensor, None]:
        """Attend with rotated q and k and the scheme's sides; context parallelism puts its own in this place."""
        how = self.how(q.size(2))
        return self.scheme.attend(q, k, v, gate, side, scale=self.scale, **how, **visibility), None

    def merge(self, y: Tensor) -> Tensor:
        """Heads (B, H, N, D) side by side and projected, (B, N, E)."""
        projected: Tensor = self.out(y.transpose(1, 2).reshape(y.size(0), y.size(2), self.n_heads * self.head_dim))
        return projected

    def explain(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cache: KVCache | PagedLayer | None = None,
    ) -> Plan:
        """Say what :meth:`forward` would run, with its errors and one for a scheme without gates; nothing is cached.

        Returns:
            The plan that :func:`gape.explain` gives for the operator. `prologue` says how q and k are made ready,
            "fused" in one pass over memory or by the scheme's own "steps"; a cache in pages is the `impl` "pages".
        """
        n, gates = self._checked(x, positions, documents, cache, attn_mask, 0), self.gates
        if gates is None:
            raise invalid_argument("position", self.position, "a scheme with gates, whose name ends in +gape")
        plain = positions is None and documents is None and attn_mask is None and cache is None
        fused = self._fused_prologue(x) if plain else None
        if fused is not None:
            return explain_fused(fused[0], *self._fused_arguments(x, *fused), scale=self.scale)

        def plan(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, side: Tensor, **visibility: Any) -> Plan:
            how = {"context_length": self.context_length, "scale": self.scale, **self.how(q.size(2))}
            return replace(explain(q, k, v, gate, side, gates.amplitude, **how, **visibility), prologue="steps")

        # What is added to a copy of the cache lies behind what the cache counts.
        given = self._steps(x, positions, documents, copy(cache), attn_mask, n)
        in_pages, mean_before = cache.explain if isinstance(cache, PagedLayer) else None, self.landmark_mean
        stated: Plan = take_steps(self, x, attend=plan, in_pages=in_pages, **given)
        self.landmark_mean = mean_before
        return stated

    def _fused_prologue(self, x: Tensor) -> tuple[FusedChoice, OnePass] | None:
        """What runs after one pass that makes q and k ready, and what that pass does; None where steps run."""
        if self.stepwise or self.keep_landmark:
            return None
        learns = torch.is_grad_enabled() and learning(x, *self.qkv.parameters(), *self.scheme.parameters())
        projection = Projection(
            device=x.device, on_gpu=x.is_cuda, dtype=working_dtype(x), tokens=x.size(1), n_heads=self.n_heads,
            content=self.content_dim, width=self.head_dim, gated=self.gates is not None, learns=learns, bare=self._bare,
        )  # fmt: skip
        chosen = choose_fused(projection, self.how(x.size(1))["impl"])
        steps = None if chosen is None else self.scheme.one_pass(x.size(1), x.device)
        return None if chosen is None or steps is None else (chosen, steps)

    def _fused_arguments(self, x: Tensor, chosen: FusedChoice, steps: OnePass) -> tuple[Any, ...]:
        """q, k and v as the fused pass takes them, angles and what reads the gates."""
        width, qkv = chosen.width, self.qkv
        if width == self.content_dim:
            y = qkv(x)
        else:
            bias = None if qkv.bias is None else self._spread(qkv.bias, width)
            y = F.linear(x, self._spread(qkv.weight.mT, width).mT, bias)
        heads = [self.n_heads * width, self.n_kv_heads * width, self.n_kv_heads * self.head_dim]
        return *self._in_heads(torch.split(y, heads, dim=-1), width), *steps

    def _spread(self, weights: Tensor, width: int) -> Tensor:
        """Weights (..., out) of a projection whose q and k have the prologue's gaps: columns of zeros."""
        content = sum(self._widths[:2])
        heads = weights[..., :content].reshape(*weights.shape[:-1], -1, self.content_dim)
        return torch.cat([prologue.spread(heads, width).flatten(-2), weights[..., content:]], dim=-1)

    @property
    def has_own_bias(self) -> bool:
        """Whether the scheme adds a bias of its own to the logits, as ALiBi and FoX do; gates do not count."""
        return self.gates is None and self.scheme.adds_to_logits

    @property
    def gates(self) -> GAPEGates | None:
        """The gates of a `+gape` scheme, None under others."""
        return self.scheme.gates if isinstance(self.scheme, schemes.Gated) else None

    @property
    def _bare(self) -> bool:
        """Whether the projection is its weights and nothing more: no hooks, no adapter, no other class."""
        qkv = self.qkv
        forward, backward = qkv._forward_hooks or qkv._forward_pre_hooks, qkv._backward_hooks or qkv._backward_pre_hooks
        return type(qkv) is nn.Linear and not forward and not backward

    def _checked(
        self,
        x: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: KVCache | PagedLayer | None,
        attn_mask: Tensor | None,
        keep: int,
    ) -> int:
        """Refuse what would break off later, when the cache has been written to; the number of tokens."""
        weight = self.qkv.weight
        if not isinstance(x, Tensor) or x.dim() != 3 or x.size(2) != weight.size(1) or not x.is_floating_point():
            raise invalid_argument("x", x, f"a floating tensor (batch, tokens, {weight.size(1)})")
        if cache is not None and not isinstance(cache, KVCache | PagedLayer):
            raise invalid_argument("cache", cache, "a KVCache, or a layer of a cache in pages")
        if isinstance(cache, PagedLayer):
            if cache.spec.owner is not self:
                raise ValueError("cache: made for another model, expected one of this layer")
            if attn_mask is not None:
                raise invalid_argument("attn_mask", attn_mask, "None with a cache in pages; documents hide pads")
            # Once for all layers: a GPU has to wait for the answer.
            if documents is not None and cache.index == 0 and bool(((documents != 0) & (documents != 1)).any()):
                raise invalid_argument("documents", documents, "0 for pads and 1 for tokens with a cache in pages")
        if cache is not None and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            raise ValueError("cache: what is cached carries no gradient, expected torch.no_grad() around the call")
        batch, n, _ = x.shape
        past = 0 if cache is None else cache.length
        inputs.positions("positions", positions, batch, n, x.device)
        inputs.documents("documents", documents, batch, n, x.device)
        inputs.mask(attn_mask, (batch, self.n_heads, n, past + n), x.device)
        if validation.whole("keep", keep, 0) > n:
            raise invalid_argument("keep", keep, f"a whole number from 0 to {n}, the tokens given")
        return n

    def extra_repr(self) -> str:
        """Sizes and scheme, for repr()."""
        return f"position={self.position!r}, heads={self.n_heads}/{self.n_kv_heads}, reserve={self.reserve}"


def _rows(mask: Tensor | None, rows: int) -> Tensor | None:
    """The last `rows` of a mask (..., N or 1, keys); a row that stands for all stays."""
    return mask if mask is None or mask.dim() < 2 or mask.size(-2) in (1, rows) else mask[..., -rows:, :]


def reserved(position: str, head_dim: int, reserve: int | None = None) -> int:
    """Coordinates of a head that are given up for the bias: `reserve`, or its default for the scheme."""
    if reserve is None:
        # A head too narrow to give coordinates up grows instead.
        return 6 if schemes.is_gated(position) and head_dim > 6 else 0
    if validation.whole("reserve", reserve, 0) >= head_dim:
        raise invalid_argument("reserve", reserve, f"a whole number from 0 to {head_dim - 1}, the head dim less one")
    return reserve
