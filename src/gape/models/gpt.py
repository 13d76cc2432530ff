"""A GPT to read from top to bottom: nanoGPT, with its positions a matter of choice.

Pre-norm blocks, a GELU MLP four times as wide, embeddings tied to the output. Nothing is learned per absolute
position: order comes from the positional scheme alone, so any length may be fed.

Shapes: B batch, N tokens, E width (n_embd), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape import positions as schemes
from gape.gates import GAPEGates
from gape.models.attention import GAPEAttention, reserved
from gape.models.cache import LayerCache, ModelCache
from gape.models.generate import generate
from gape.models.loss import IGNORED, sliced_cross_entropy, summed_cross_entropy, token_cross_entropy
from gape.ops import available_implementations
from gape.ops.checks import flag, refuse
from gape.positions.checks import whole
from gape.suggest import suggestion

#: Vocabularies above this many tokens are trained without whole logits.
LARGE_VOCABULARY = 8192


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Everything that fixes the function of a GPT but its weights. To be saved with them.

    Attributes:
        vocab_size, n_layer, n_head, n_embd: V, layers, query heads and E, a multiple of n_head.
        context_length: T, the training length, by which gates divide distances. Not a limit.
        n_kv_head: key and value heads, a divisor of n_head; n_head when None.
        position: a name of :func:`gape.positions.available`.
        reserve: coordinates of each head given up for the bias, as in :class:`gape.GAPEAttention`; 6 for gated
            schemes and 0 for others when None.
        bias: whether linear layers and norms have biases.
        dropout: on embeddings and on what each block adds; attention weights are never dropped.
        impl: which implementation of the gated operator runs.
        options: options of the scheme and of its gates, such as {"gate_floor": 4.0}.

    Raises:
        ValueError: for a value out of range; names the argument. Options are checked where a model is built.
    """

    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    context_length: int
    n_kv_head: int | None = None
    position: str = "p-rope+gape"
    reserve: int | None = None
    bias: bool = False
    dropout: float = 0.0
    impl: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "n_head", "n_embd", "context_length"):
            whole(name, getattr(self, name))
        if self.n_embd % self.n_head:
            raise refuse("n_embd", self.n_embd, f"a multiple of n_head = {self.n_head}")
        if self.n_kv_head is not None and self.n_head % whole("n_kv_head", self.n_kv_head):
            raise refuse("n_kv_head", self.n_kv_head, f"a divisor of n_head = {self.n_head}")
        try:
            schemes.is_gated(self.position)
        except ValueError as error:
            raise ValueError(f"position: {str(error).removeprefix('name: ')}") from None
        flag("bias", self.bias)
        reserved(self.position, self.head_dim, self.reserve)
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise refuse("dropout", self.dropout, "a number from 0 to below 1")
        if self.impl not in ("auto", *available_implementations()):
            raise refuse("impl", self.impl, f"'auto' or one of {available_implementations()}")
        if not isinstance(self.options, Mapping):
            raise refuse("options", self.options, "a mapping from names of options to their values")
        # Lists, as JSON has them: a configuration equals itself after it was saved and read.
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in self.options.items()}
        object.__setattr__(self, "options", plain)

    @property
    def head_dim(self) -> int:
        """Width of a head, E / n_head."""
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def reserved(self) -> int:
        """Coordinates of each head's q and k that carry the bias instead of content."""
        return reserved(self.position, self.head_dim, self.reserve)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON that :meth:`from_dict` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GPTConfig:
        """The configuration that a dictionary describes.

        Raises:
            ValueError: for a key that is unknown, with a suggestion, or missing, or a value out of range.
        """
        known = {f.name: f for f in fields(cls)}
        for name in values:
            if name not in known:
                meant = suggestion(name, known)
                raise ValueError(f"{name}: not a key of GPTConfig, expected one of {', '.join(known)}{meant}")
        needed = [f.name for f in known.values() if f.default is f.default_factory is MISSING]
        missing = [name for name in needed if name not in values]
        if missing:
            raise ValueError(f"{missing[0]}: missing, expected a value")
        return cls(**values)


class Output(NamedTuple):
    """What a forward pass returns.

    Attributes:
        logits: (B, N or logits_to_keep or 0, V).
        loss: the mean cross entropy over the targets that count, in float32 or float64; None without targets.
    """

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
    """Attention, then the MLP, each on a normed copy whose answer is added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = GAPEAttention(
            config.n_embd,
            config.n_head,
            config.n_kv_head,
            context_length=config.context_length,
            position=config.position,
            reserve=config.reserve,
            bias=config.bias,
            impl=config.impl,
            **config.options,
        )
        self.mlp_norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """x (B, N, E) → (B, N, E); the rest as in :meth:`gape.GAPEAttention.forward`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), positions, documents, cache))
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
        # It also is the output layer. One tensor under one name: nothing to tie again after loading.
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
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
            nn.init.normal_(block.mlp.up.weight, std=0.02)
            nn.init.normal_(block.mlp.down.weight, std=added)
            for linear in (block.mlp.up, block.mlp.down):
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: ModelCache | None = None,
        logits_to_keep: int | None = None,
    ) -> Output:
        """Predict the next token of every position.

        Args:
            ids: int64 or int32 (B, N), from 0 to V − 1.
            targets: int64 (B, N): the token that should follow, or −100 where none counts.
            positions: integer (N,) or (B, N); None counts on from what is cached, from 0 without a cache.
            documents: integer (B, N): only equal ids see each other. Give pads an id of their own.
            cache: what earlier calls left, from :meth:`new_cache`; these tokens are added to it. For inference.
            logits_to_keep: return logits of the last so many tokens only; 0 returns all. None returns all too, but
                none, (B, 0, V), in training with targets and a vocabulary above 8,192. The loss is that of all
                targets in any case; where not all logits are returned no more than 8,192 rows of them ever exist.

        Returns:
            (logits, loss). Where no target counts the loss is 0.

        Raises:
            ValueError: for an argument of wrong shape, dtype or (on a CPU) value; names it.
        """
        self._check(ids, targets, logits_to_keep)
        x = self.hidden(ids, positions, documents, cache)
        if logits_to_keep is None and targets is not None and self.training and self._large:
            logits = x.new_empty(x.size(0), 0, self.config.vocab_size)
        else:
            logits = self.logits(x[:, -(logits_to_keep or 0) :])
        if targets is None:
            return Output(logits, None)
        counted = (targets != IGNORED).sum().clamp(min=1)
        if logits.size(1) == x.size(1):
            return Output(logits, summed_cross_entropy(logits, targets) / counted)
        return Output(logits, sliced_cross_entropy(x, self.embedding.weight, targets) / counted)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """What the last layer reads: ids (B, N) → normed (B, N, E). Arguments as in :meth:`forward`."""
        self._check_cache(cache)
        try:
            x = self.dropout(self.embedding(ids))
        except IndexError:
            raise refuse("ids", ids, f"values from 0 to {self.config.vocab_size - 1}") from None
        caches = [None] * self.config.n_layer if cache is None else cache.layers
        for block, remembered in zip(self.blocks(), caches, strict=True):
            x = block(x, positions, documents, remembered)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, x: Tensor) -> Tensor:
        """The last layer alone: normed x (B, N, E) → (B, N, V)."""
        return F.linear(x, self.embedding.weight)

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The cross entropy of each target of normed x (B, N, E), without gradients: (B, N), 0 where it is −100."""
        return token_cross_entropy(x, self.embedding.weight, targets)

    @property
    def _large(self) -> bool:
        return self.config.vocab_size > LARGE_VOCABULARY

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
        """Have every forward pass leave what :meth:`landmark_penalty` needs, or no longer.

        Raises:
            ValueError: the scheme has no landmarks.
        """
        if keep and next(self.gates(), None) is None:
            raise refuse("position", self.config.position, "a scheme with gates, since landmarks are asked for")
        for block in self.blocks():
            block.attention.keep_landmark, block.attention.landmark_mean = keep, None

    def landmark_penalty(self) -> Tensor:
        """The mean landmark of the last forward pass, over layers, heads and tokens, with its gradient. Read it once.

        Raises:
            ValueError: no forward pass came after :meth:`keep_landmarks`.
        """
        means = []
        for block in self.blocks():
            if block.attention.landmark_mean is None:
                raise ValueError("landmark_penalty: nothing is kept, expected keep_landmarks() and then a forward pass")
            means.append(block.attention.landmark_mean)
            block.attention.landmark_mean = None
        return torch.stack(means).mean()

    def parameter_kinds(self) -> dict[str, dict[str, nn.Parameter]]:
        """Parameters by what they are, each under its name: "matrices", "embeddings", "norms", "biases", "position".

        "position" is everything that belongs to a positional scheme: gates, amplitudes, tables.
        """
        kinds: dict[str, dict[str, nn.Parameter]] = {
            kind: {} for kind in ("matrices", "embeddings", "norms", "biases", "position")
        }
        of_schemes = {p for m in self.modules() if isinstance(m, schemes.Scheme) for p in m.parameters()}
        for prefix, module in self.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter in of_schemes:
                    kind = "position"
                elif isinstance(module, nn.LayerNorm):
                    kind = "norms"
                elif isinstance(module, nn.Embedding):
                    kind = "embeddings"
                else:
                    kind = "biases" if parameter.dim() == 1 else "matrices"
                kinds[kind][name] = parameter
        return kinds

    def count_parameters(self) -> int:
        """Numbers that are learned; the embedding, which is also the output layer, counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _check(self, ids: Tensor, targets: Tensor | None, logits_to_keep: int | None) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 2:
            raise refuse("ids", ids, "an int64 or int32 tensor (batch, tokens)")
        if targets is not None and (
            not isinstance(targets, Tensor) or targets.dtype != torch.int64 or targets.shape != ids.shape
        ):
            raise refuse("targets", targets, f"int64 {tuple(ids.shape)} as ids")
        if logits_to_keep is not None and whole("logits_to_keep", logits_to_keep, at_least=0) > ids.size(1):
            raise refuse("logits_to_keep", logits_to_keep, f"a whole number from 0 to {ids.size(1)}, the tokens given")

    def _check_cache(self, cache: ModelCache | None) -> None:
        if cache is not None:
            if len(cache.layers) != self.config.n_layer:
                raise refuse("cache", cache, f"a cache of {self.config.n_layer} layers")
            # Reading the length refuses a cache that a call left uneven.
            _ = cache.length
