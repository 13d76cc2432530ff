"""Gates of injected layers: their settings, their parameters, and which parameters of a model learn."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape import positions as schemes
from gape.gates import GAPEGates
from gape.hf.families import Family, family_of
from gape.models.attention import GAPEAttention
from gape.positions.base import keyword_defaults
from gape.train import optimizer
from gape.utils.validation import invalid_argument, positive_number, whole

#: The name under which an attention module keeps its gates; also for PEFT's modules_to_save.
MODULE = "gape"
log = logging.getLogger("gape.hf")
#: How an injected model begins: with its own logits, or with the gates of the paper.
STARTS = ("identity", "paper")
#: What may learn: the gates alone, the projections of q and k too, or everything.
LEARN = ("gates", "gates+qk", "all")
#: The largest T. It is saved beside the gates and stays exact where they are cast to float32.
LONGEST = 2**24
#: Settings whose hashes are saved beside the gates and T, since gates trained under others mean something else.
HASHED = ("position", "layers", "gates", "options", "softcap")
#: What a config has beside the settings: a checksum of the gates, and what the model card says.
NOTES = ("checksum", "base_model", "license", "measured")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an injection, saved in the model's config.

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
        centered: whether the gates have a mean that keys are without; see :mod:`gape.hf.centering`.

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
    centered: bool = False

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

    def fingerprint(self) -> list[int]:
        """T and a hash of each of :data:`HASHED`, saved beside the gates; 4 and 4.0 have the same.

        No number is above 2²⁴, so that all stay exact in float32.
        """
        values = self.to_dict()
        texts = (json.dumps(_plain(values[name]), sort_keys=True).encode() for name in HASHED)
        hashes = (int.from_bytes(hashlib.sha256(text).digest()[:3]) for text in texts)
        return [self.context_length, *hashes]

    def to_dict(self) -> dict[str, Any]:
        """For config.json."""
        return {**asdict(self), "layers": None if self.layers is None else list(self.layers)}

    @classmethod
    def from_config(cls, config: Any) -> Settings:
        """The settings in a model's config; a ValueError where there are none, or unknown ones."""
        stored = getattr(config, "gape", None)
        if not isinstance(stored, Mapping):
            raise invalid_argument("config.gape", stored, "the settings that gape.hf.inject writes there")
        values = {key: value for key, value in stored.items() if key not in NOTES}
        names = {field.name for field in fields(cls)}
        if "context_length" not in values or not names.issuperset(values):
            expected = f"context_length, and nothing but {', '.join(sorted(names))}"
            raise invalid_argument("config.gape", sorted(values), expected)
        layers = values.get("layers")
        return cls(**{**values, "layers": None if layers is None else tuple(layers)})


def _plain(value: Any) -> Any:
    """The value with whole floats as integers, at any depth."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: Schemes that need nothing from a layer but q and k.
_POSITIONS = tuple(
    name for base in ("nope", "rope", "p-rope", "hope", "pi", "ntk", "yarn") for name in (base, f"{base}+gape")
)


#: Γ·(1 + floor) below which a key loses less than a hundredth of a nat over T tokens.
IDLE = 0.01
REMEDY = "start='paper' lets gates act at once, and about ten times the learning rate of the rest lets them learn"
_WARNED: WeakSet[nn.Module] = WeakSet()


class RetrofitGates(GAPEGates):
    """Gates for a trained model, which may start with a bias of exactly zero: Γ_h = |s_h| · softplus(γ_h).

    "identity" starts with the strength s = 0: the bias is zero, so the model's logits are its own. At s = 0 the
    derivative of |s| is taken as 1, so the first update moves s off zero, to either side. From then on |s| > 0, and
    every other gate parameter has a gradient. g, l and γ start where the paper starts. "paper" starts with s = 1,
    which is the paper's Γ = 1.

    Beside the parameters, T and hashes of the injection's settings are saved in `settings`. Loading a state with others
    is an error, also that of an adapter. `key_center` (Hk, D), if there, is taken from keys before gates read them.

    Args:
        n_heads, head_dim, n_kv_heads: as in :class:`gape.GAPEGates`.
        injection: the settings of the injection.
        **options: options of :class:`gape.GAPEGates`.

    Raises:
        ValueError: what :class:`gape.GAPEGates` refuses.
    """

    settings: Tensor
    key_center: Tensor | None

    def __init__(self, n_heads: int, head_dim: int, n_kv_heads: int, injection: Settings, **options: Any) -> None:
        super().__init__(n_heads, head_dim, n_kv_heads, **options)
        self.injection = injection
        self.strength = nn.Parameter(torch.full((n_heads,), float(injection.start == "paper")))
        # Integers, so that casting a model to half precision leaves them alone.
        self.register_buffer("settings", torch.tensor(injection.fingerprint()))
        self.register_buffer("key_center", torch.zeros(n_kv_heads, head_dim) if injection.centered else None)

    def reset_parameters(self) -> None:
        """Draw the projections again and set everything else to its start."""
        super().reset_parameters()
        nn.init.constant_(self.strength, float(self.injection.start == "paper"))

    @property
    def amplitude(self) -> Tensor:
        """Γ, (Hq,) in float32 or float64; 0 at an identity start."""
        dtype = torch.promote_types(self.strength.dtype, torch.float32)
        strength, raw = self.strength.to(dtype), self.raw_amplitude.to(dtype)
        sign = torch.where(strength < 0, -1.0, 1.0).to(dtype)
        # Not through the parent's property, which a compiler cannot follow.
        return strength * sign * F.softplus(raw)

    @torch.no_grad()
    def move_keys(self, by: Tensor | None = None) -> None:
        """Move all keys by −`by`, (Hk, D), on top of what they are moved by; landmarks stay what they are."""
        device = self.strength.device
        by = torch.zeros(self.n_kv_heads, self.head_dim, device=device) if by is None else by
        old = torch.zeros_like(by) if self.key_center is None else self.key_center.to(by)
        # Of few bits, so that it is the same number in every dtype of keys.
        new = (old + by).bfloat16().to(by)
        self.register_buffer("key_center", new.to(device, torch.float32))
        if self.landmark_projection is not None:
            weight, bias = self.landmark_projection.weight, self.landmark_projection.bias
            bias.add_((weight.to(by) * (new - old)).sum(-1).to(bias))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        refuse_other_settings(state_dict.get(f"{prefix}settings"), self.injection, prefix)
        if self.key_center is None and f"{prefix}key_center" in state_dict:
            self.register_buffer("key_center", torch.zeros(self.n_kv_heads, self.head_dim, device=self.strength.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def warn_of_idle(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> None:
    """Warn once for a model whose gates were trained and yet change nothing. Gates that never learned are at 0.

    `state` has the tensors of a model that is sharded; None takes those of its modules.
    """
    largest = 0.0
    for name, gates in model.named_modules():
        if isinstance(gates, RetrofitGates):
            strength = gates.strength if state is None else state.get(f"{name}.strength")
            if strength is not None:
                strengths = strength.detach().abs().tolist()
                largest = max(largest, *(s * (1 + floor) for s, floor in zip(strengths, gates.gate_floor, strict=True)))
    if 0 < largest < IDLE and model not in _WARNED:
        _WARNED.add(model)
        log.warning("gates cannot act: no strength is above %.1g, so nothing fades; %s", largest, REMEDY)


def refuse_other_settings(stored: Tensor | list[int] | None, own: Settings, source: str) -> None:
    """Refuse gates that were trained with another T, or under other settings of an injection than the model's.

    `stored` is what :meth:`Settings.fingerprint` gave when the gates were saved; None accepts all. The error names the
    source, and the stored T or the settings that differ, with the model's values of them.
    """
    if isinstance(stored, Tensor):
        stored = None if stored.device.type == "meta" else stored.to(torch.int64).tolist()
    if stored is None:
        return
    length, *hashes = stored
    if length != own.context_length:
        raise ValueError(f"context_length: {source} was trained with T = {length}, expected {own.context_length}")
    own_hashes = own.fingerprint()[1:]
    if hashes != own_hashes:
        pairs = zip(HASHED, hashes, own_hashes, strict=True)
        values = own.to_dict()
        words = ", ".join(f"{name} = {values[name]!r}" for name, was, now in pairs if was != now)
        raise ValueError(
            f"{source} was trained under other settings than the model's {words}; inject with those it had"
        )


def parameters(model: Any, which: str = "gates") -> list[nn.Parameter]:
    """Parameters of a model with gates, for an optimiser.

    Args:
        model: with gates of :func:`gape.hf.inject`, or a :class:`gape.hf.GapeForCausalLM`.
        which: "gates", "gates+qk" (the projections of q and k and their norms too; where q, k and v share one
            projection, that one), or "all".

    Raises:
        ValueError: another word, or a model without gates.
    """
    if which not in LEARN:
        raise invalid_argument("which", which, f"one of {', '.join(LEARN)}")
    if which == "all":
        return list(model.parameters())
    if not has_gates(model):
        raise invalid_argument("model", type(model).__name__, "one with gates, as gape.hf.inject makes it")
    gates = [p for m in model.modules() if isinstance(m, GAPEGates) for p in m.parameters()]
    if which == "gates":
        return gates
    own = [p for m in model.modules() if isinstance(m, GAPEAttention) for p in m.qkv.parameters()]
    if own:
        return gates + own
    family = family_of(model)
    return gates + [p for module in family.modules(model) for _, p in qk_modules(module, family)]


def parameter_groups(
    model: nn.Module, lr: float, gate_rate: float = 10.0, *, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for an optimiser of torch in which gates learn faster than the rest, as `gape hf finetune` trains.

    At one rate for all, a short fine-tune leaves gates where they start.

    Args:
        model: with gates or without; frozen parameters are left out.
        lr: the rate of everything but the gates.
        gate_rate: the rate of the gates, in multiples of `lr`.
        weight_decay: of tensors of two dimensions or more; gates, norms and biases are never decayed.

    Raises:
        ValueError: a rate that is not positive, or a model in which nothing learns.
    """
    positive_number("lr", lr)
    positive_number("gate_rate", gate_rate)
    groups = optimizer.parameter_groups(model, weight_decay=weight_decay, gate_lr_multiplier=gate_rate)
    if not groups:
        raise invalid_argument("model", type(model).__name__, "one with parameters that require a gradient")
    return [{**group, "lr": lr * group["lr_multiplier"]} for group in groups]


def has_gates(model: nn.Module) -> bool:
    """Whether any layer of a model has gates."""
    return any(isinstance(module, GAPEGates) for module in model.modules())


def qk_modules(module: nn.Module, family: Family) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of the projections (and norms) of q and k in an attention module."""
    for name in family.layout.projections:
        part = getattr(module, name, None)
        if part is not None:
            yield from part.named_parameters(prefix=name)


def freeze(model: Any, learn: str) -> None:
    """Freeze what should not learn; "all" leaves everything as it is."""
    if learn == "all":
        return
    learning = {id(parameter) for parameter in parameters(model, learn)}
    for parameter in model.parameters():
        # Quantised ones are integers, which cannot learn.
        parameter.requires_grad_(id(parameter) in learning and parameter.is_floating_point())
