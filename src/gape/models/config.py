"""The configuration of a GPT, saved beside its weights, and options that differ from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from gape import positions as schemes
from gape.models.attention import reserved
from gape.ops import available_implementations
from gape.utils.settings import refuse_unknown
from gape.utils.validation import flag, invalid_argument, weight, whole


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The configuration of a GPT: everything but its weights, to be saved with them.

    Attributes:
        vocab_size, n_layer, n_head, n_embd: V, layers, query heads and E, a multiple of n_head.
        context_length: T, the training length, by which gates divide distances. Not a limit.
        n_kv_head: key and value heads, a divisor of n_head; n_head when None.
        position: a name of :func:`gape.positions.available`.
        reserve: coordinates of each head reserved for the bias, as in :class:`gape.GAPEAttention`; 6 for gated
            schemes and 0 for others when None.
        bias: whether linear layers and norms have biases.
        tied: whether the embedding also is the output layer.
        dropout: on embeddings and on the outputs of each block; attention weights are never dropped.
        impl: which implementation of the gated operator runs.
        options: of the scheme and its gates, such as {"gate_floor": 4.0}; :func:`gape.models.config.of_layer`.

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
    tied: bool = True
    dropout: float = 0.0
    impl: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "n_head", "n_embd", "context_length"):
            whole(name, getattr(self, name))
        if self.n_embd % self.n_head:
            raise invalid_argument("n_embd", self.n_embd, f"a multiple of n_head = {self.n_head}")
        if self.n_kv_head is not None and self.n_head % whole("n_kv_head", self.n_kv_head):
            raise invalid_argument("n_kv_head", self.n_kv_head, f"a divisor of n_head = {self.n_head}")
        try:
            schemes.is_gated(self.position)
        except ValueError as error:
            raise ValueError(f"position: {str(error).removeprefix('name: ')}") from None
        flag("bias", self.bias)
        flag("tied", self.tied)
        reserved(self.position, self.head_dim, self.reserve)
        weight("dropout", self.dropout)
        if self.impl not in ("auto", *available_implementations()):
            raise invalid_argument("impl", self.impl, f"'auto' or one of {available_implementations()}")
        if not isinstance(self.options, Mapping):
            raise invalid_argument("options", self.options, "a mapping from names of options to their values")
        # Lists, as in JSON: a configuration equals itself after it was saved and read.
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
        """The configuration that a dictionary describes; a ValueError names a key that is unknown or missing."""
        refuse_unknown("", values, [f.name for f in fields(cls)])
        for f in fields(cls):
            if f.default is f.default_factory is MISSING and f.name not in values:
                raise ValueError(f"{f.name}: missing, expected a value")
        return cls(**values)


#: Options that may be given as one list for each layer.
BY_LAYER = ("gate_floor", "head_positions", "log_scale", "window")


def of_layer(options: Mapping[str, Any], layer: int, n_layer: int) -> dict[str, Any]:
    """The options of one layer of n_layer, from 0.

    A value is used for all heads of all layers, a list for the heads of every layer, a list of lists has one list for
    each layer: one value per head, or one value for all heads. Floors are those of query heads, positions and scales
    those of key heads. A window is that of a layer: a number, or [[0], [256], …].
    """
    chosen = dict(options)
    for name in BY_LAYER:
        value = options.get(name)
        if not isinstance(value, list | tuple) or not any(isinstance(each, list | tuple) for each in value):
            continue
        if len(value) != n_layer or not all(isinstance(each, list | tuple) and each for each in value):
            raise invalid_argument(name, value, f"a list for each of the {n_layer} layers")
        own = value[layer]
        chosen[name] = own[0] if len(own) == 1 else list(own)
    return chosen
