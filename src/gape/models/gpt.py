"""A GPT to read from top to bottom: nanoGPT with a choice of positional schemes.

Pre-norm blocks, a GELU MLP four times as wide, embeddings tied to the output by default. Nothing is learned per
absolute position: order comes from the positional scheme alone, so inputs may have any length.

Shapes: B batch, N tokens, E width (n_embd), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.cache.kv import KVCache, ModelCache
from gape.cache.layer import PagedLayer
from gape.cache.paged import PagedCache
from gape.gates import GAPEGates
from gape.models.attention import GAPEAttention
from gape.models.config import GPTConfig, of_layer
from gape.models.generate import generate
from gape.models.loss import mean_loss, sliced_cross_entropy, summed_cross_entropy, token_cross_entropy
from gape.utils.validation import invalid_argument, whole

#: Vocabularies above this many tokens are trained without whole logits.
LARGE_VOCABULARY = 8192


class Output(NamedTuple):
    """Logits (B, N or logits_to_keep or 0, V), and the mean cross entropy in float32 or float64 where targets are."""

    logits: Tensor
    loss: Tensor | None


class MLP(nn.Module):
    """Two linear layers around a GELU, (B, N, E) → (B, N, E)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, E) → (B, N, E)."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention, then the MLP, each on a normed copy whose output is added to the stream."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = GAPEAttention(
            config.n_embd, config.n_head, config.n_kv_head, context_length=config.context_length,
            position=config.position, reserve=config.reserve, bias=config.bias, impl=config.impl,
            **of_layer(config.options, layer, config.n_layer),
        )  # fmt: skip
        self.mlp_norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, cache: KVCache | PagedLayer | None,
        keep: int = 0,
    ) -> Tensor:  # fmt: skip
        """x (B, N, E) → (B, N or keep, E); the rest as in :meth:`gape.GAPEAttention.forward`."""
        update = self.attention(self.attention_norm(x), positions, documents, cache, keep=keep)
        x = _last(x, keep or x.size(1)) + self.dropout(update)
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class GPT(nn.Module):
    """A decoder-only transformer under any positional scheme, integer (B, N) → logits (B, N, V).

    Args:
        config: its sizes and its scheme.

    Raises:
        ValueError: for an option that the scheme does not take; names it.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        # Tied, it also is the output layer. One tensor under one name: nothing to tie again after loading.
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw embeddings and projections from a normal of deviation 0.02, biases 0; schemes draw their own.

        What is added to the stream starts smaller by √(2·n_layer), the number of additions.
        """
        nn.init.normal_(self.embedding.weight, std=0.02)
        added = 0.02 / math.sqrt(2 * self.config.n_layer)
        for block in self.blocks():
            block.attention.reset_parameters()
            nn.init.normal_(block.attention.out.weight, std=added)
            for linear, std in ((block.mlp.up, 0.02), (block.mlp.down, added)):
                nn.init.normal_(linear.weight, std=std)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.02)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: ModelCache | PagedCache | None = None,
        logits_to_keep: int | None = None,
        weights: Tensor | None = None,
    ) -> Output:
        """Predict the next token of every position.

        Args:
            ids: int64 or int32 (B, N), from 0 to V − 1.
            targets: int64 (B, K): the tokens that should follow the last K ≤ N, or −100 where none counts.
            positions: integer (N,) or (B, N); None counts on from what is cached, from 0 without a cache.
            documents: integer (B, N): only equal ids see each other. Give pads an id of their own.
            cache: keys and values of earlier calls, from :meth:`new_cache`; these tokens are added. For inference.
            logits_to_keep: return the logits of so many last tokens, 0 those of all. None returns all, or with targets
                those of the K tokens that have one; but none, (B, 0, V), in training with targets and a vocabulary
                above 8,192. Where not all are returned, no more than 8,192 rows of them exist at once.
            weights: float32 like targets, how much each counts in the mean loss; None for all alike.

        Returns:
            (logits, loss). The loss is that of all targets, and 0 where none counts.

        Raises:
            ValueError: for an argument of wrong shape, dtype or (on a CPU) value; names it.
        """
        self._check(ids, targets, logits_to_keep)
        # How many of the last tokens have targets, and how many have their logits returned.
        counted, returned = 0 if targets is None else targets.size(1), logits_to_keep or ids.size(1)
        if targets is not None and logits_to_keep is None:
            returned = 0 if self.training and self.config.vocab_size > LARGE_VOCABULARY else counted
        x = self.hidden(ids, positions, documents, cache, keep=max(returned, counted))
        sliced = returned < counted
        none = sliced and not returned
        logits = x.new_empty(x.size(0), 0, self.config.vocab_size) if none else self.logits(_last(x, returned))
        if targets is None:
            return Output(logits, None)
        if sliced:
            total = sliced_cross_entropy(_last(x, counted), self.output_weight, targets, weights)
        else:
            total = summed_cross_entropy(_last(logits, counted), targets, weights)
        return Output(logits, mean_loss(total, targets, weights))

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: ModelCache | PagedCache | None = None,
        keep: int = 0,
    ) -> Tensor:
        """What the output layer reads: ids (B, N) → normed (B, N, E), or (B, keep, E) of the last tokens if keep > 0.

        The other arguments are those of :meth:`forward`.
        """
        if cache is not None:
            if len(cache.layers) != self.config.n_layer:
                raise invalid_argument("cache", cache, f"a cache of {self.config.n_layer} layers")
            cache.enter(self)
        if whole("keep", keep, at_least=0) > ids.size(1):
            # Raised before any layer's cache is written to.
            raise invalid_argument("keep", keep, f"a whole number from 0 to {ids.size(1)}, the tokens given")
        try:
            x = self.dropout(self.embedding(ids))
        except IndexError:
            raise invalid_argument("ids", ids, f"values from 0 to {self.config.vocab_size - 1}") from None
        caches = [None] * self.config.n_layer if cache is None else cache.layers
        for index, (block, layer_cache) in enumerate(zip(self.blocks(), caches, strict=True), start=1):
            # Only the last layer may leave tokens out: later layers read those of the others.
            x = block(x, positions, documents, layer_cache, keep if index == self.config.n_layer else 0)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, x: Tensor) -> Tensor:
        """The output layer alone: normed x (B, N, E) → (B, N, V)."""
        return F.linear(x, self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer, (V, E): the embedding's where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The cross entropy of each target of normed x (B, N, E), without gradients: (B, N), 0 where it is −100."""
        return token_cross_entropy(x, self.output_weight, targets)

    #: Continue prompts (B, N): a method with the arguments of :func:`gape.models.generate.generate`.
    generate = generate

    def new_cache(self, capacity: int = 0) -> ModelCache:
        """An empty cache for `forward`, with room for `capacity` tokens at once."""
        return ModelCache(self.config.n_layer, capacity)

    def blocks(self) -> Iterator[Block]:
        """The layers, first to last."""
        return iter(cast(Iterable[Block], self.layers))

    def gates(self) -> Iterator[tuple[int, GAPEGates]]:
        """(layer index, gates) of every layer that has gates."""
        for index, block in enumerate(self.blocks()):
            if block.attention.gates is not None:
                yield index, block.attention.gates

    def keep_landmarks(self, keep: bool = True) -> None:
        """Let forward passes store what :meth:`landmark_penalty` needs; a ValueError for a scheme without landmarks."""
        if keep and next(self.gates(), None) is None:
            raise invalid_argument("position", self.config.position, "a scheme with gates, which has landmarks")
        for block in self.blocks():
            block.attention.keep_landmark, block.attention.landmark_mean = keep, None

    def landmark_penalty(self) -> Tensor:
        """The mean landmark of the last forward pass after :meth:`keep_landmarks`, with its gradient. Read it once."""
        means = []
        for block in self.blocks():
            if block.attention.landmark_mean is None:
                raise ValueError("landmark_penalty: nothing is stored, expected keep_landmarks() and a forward pass")
            means.append(block.attention.landmark_mean)
            block.attention.landmark_mean = None
        return torch.stack(means).mean()

    def count_parameters(self) -> int:
        """The number of parameters; an embedding that is also the output layer counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _check(self, ids: Tensor, targets: Tensor | None, logits_to_keep: int | None) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 2:
            raise invalid_argument("ids", ids, "an int64 or int32 tensor (batch, tokens)")
        if targets is not None:
            fits = isinstance(targets, Tensor) and targets.dtype == torch.int64 and targets.dim() == 2
            if not fits or targets.size(0) != ids.size(0) or targets.size(1) > ids.size(1):
                expected = f"int64 {tuple(ids.shape)} as ids, or of its last tokens only"
                raise invalid_argument("targets", targets, expected)
        if logits_to_keep is not None and whole("logits_to_keep", logits_to_keep, at_least=0) > ids.size(1):
            expected = f"a whole number from 0 to {ids.size(1)}, the tokens given"
            raise invalid_argument("logits_to_keep", logits_to_keep, expected)


def _last(x: Tensor, rows: int) -> Tensor:
    """The last `rows` of x (B, N, …); x itself for all of them, since a slice costs a copy in the backward pass."""
    return x if x.size(1) == rows else x[:, x.size(1) - rows :]
