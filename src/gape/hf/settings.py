"""What is said of an injection: checked once, and kept in the model's config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gape import positions as schemes
from gape.gates import GAPEGates
from gape.positions.base import keyword_defaults
from gape.utils.validation import invalid_argument, whole

#: How an injected model begins: with its own logits, or with the gates of the paper.
STARTS = ("identity", "paper")
#: What may learn: the gates alone, the projections of q and k beside them, everything.
LEARN = ("gates", "gates+qk", "all")
#: The largest T: beside the gates it outlives a stay in float32.
LONGEST = 2**24
#: Settings without which gates mean something else; T is kept by itself.
MARKED = ("position", "layers", "gates", "options", "softcap")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an injection.

    Attributes:
        context_length: T.
        position: a scheme that takes the place of the model's own positions; None keeps those and adds gates.
        layers: numbers of the layers, rising; None means all.
        start: "identity" or "paper".
        gates: options of :class:`gape.GAPEGates`.
        options: options of the scheme.
        softcap: whether capped logits stay capped; False only where the model's implementation did not cap them.
        learn: which parameters learn, "gates", "gates+qk" or "all".
        native: the model's own `max_position_embeddings`, where the scheme makes it longer; None elsewhere.

    Raises:
        ValueError: a value out of range; names it.
    """

    context_length: int
    position: str | None = None
    layers: tuple[int, ...] | None = None
    start: str = "identity"
    gates: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    softcap: bool = True
    learn: str = "all"
    native: int | None = None

    def __post_init__(self) -> None:
        if self.context_length is None:
            raise invalid_argument("context_length", None, "T, the length the model is (or will be) trained at")
        if whole("context_length", self.context_length) > LONGEST:
            raise invalid_argument("context_length", self.context_length, f"at most {LONGEST:,} tokens")
        for name, words in (("start", STARTS), ("learn", LEARN)):
            if getattr(self, name) not in words:
                raise invalid_argument(name, getattr(self, name), f"one of {', '.join(words)}")
        if self.position is not None and self.position not in _POSITIONS:
            raise invalid_argument("position", self.position, f"None or one of {', '.join(_POSITIONS)}")
        known = set(keyword_defaults(GAPEGates))
        for name in self.gates:
            if name not in known:
                raise ValueError(f"gates: {name!r} is not an option of the gates, expected one of {sorted(known)}")

    @property
    def gated(self) -> bool:
        """Whether gates are put in."""
        return self.position is None or schemes.is_gated(self.position)

    @property
    def base(self) -> str | None:
        """The scheme without gates, or None."""
        return None if self.position is None else self.position.removesuffix("+gape")

    def marks(self, *, as_given: bool = False) -> list[int]:
        """A number for each of :data:`MARKED`, kept beside the gates: what is another there is another value.

        Each is below 2²⁴, so that it outlives a stay in float32. 4 and 4.0 are one value, unless `as_given`, as older
        models were marked.
        """
        values = self.to_dict()
        told = (values[name] if as_given else _plain(values[name]) for name in MARKED)
        texts = (json.dumps(value, sort_keys=True).encode() for value in told)
        return [int.from_bytes(hashlib.sha256(text).digest()[:3]) for text in texts]

    def to_dict(self) -> dict[str, Any]:
        """For config.json."""
        values = asdict(self)
        return {**values, "layers": None if self.layers is None else list(self.layers)}

    @classmethod
    def from_config(cls, config: Any) -> Settings:
        """The settings that a model's config keeps.

        Raises:
            ValueError: it keeps none, or others than are known here.
        """
        stored = getattr(config, "gape", None)
        if not isinstance(stored, Mapping):
            raise invalid_argument("config.gape", stored, "what gape.hf.inject leaves there")
        values = {key: value for key, value in stored.items() if key != "checksum"}
        named = {known.name for known in fields(cls)}
        if "context_length" not in values or not named.issuperset(values):
            raise invalid_argument(
                "config.gape", sorted(values), f"context_length, and nothing but {', '.join(sorted(named))}"
            )
        layers = values.get("layers")
        return cls(**{**values, "layers": None if layers is None else tuple(layers)})


def _plain(value: Any) -> Any:
    """The value with whole numbers as such, at whatever depth."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: Schemes that need nothing from a layer but q and k.
_POSITIONS = tuple(name for base in ("nope", "rope", "p-rope", "pi", "ntk", "yarn") for name in (base, f"{base}+gape"))
