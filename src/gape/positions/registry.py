"""Names of schemes, and how a name and its options become a scheme."""

from __future__ import annotations

from typing import Any

from gape.gates import GAPEGates
from gape.positions.base import Scheme, keyword_defaults
from gape.positions.biases import FIRE, GRAPE, T5, ALiBi, FoX, Kerple
from gape.positions.gated import Gated
from gape.positions.rotary import NTK, PI, SWAN, HoPE, LongRoPE, NoPE, PRoPE, RoPE, Rotary, YaRN
from gape.utils.validation import invalid_argument, suggestion

_SCHEMES: dict[str, type[Scheme]] = {
    "nope": NoPE,
    "rope": RoPE,
    "p-rope": PRoPE,
    "hope": HoPE,
    "pi": PI,
    "ntk": NTK,
    "yarn": YaRN,
    "longrope": LongRoPE,
    "alibi": ALiBi,
    "kerple": Kerple,
    "fire": FIRE,
    "t5": T5,
    "fox": FoX,
    "grape": GRAPE,
    "swan": SWAN,
}
_BUILT_IN = frozenset(_SCHEMES)
_GATES = "+gape"


def register(name: str, scheme: type[Scheme]) -> None:
    """Make a scheme of your own known by a name, to :func:`build`, layers, models and recipes.

    `+gape` may follow the name unless `scheme.refuses_gates` says why not. The name holds in this process; models are
    saved with the name alone, so register it before they are loaded.

    Args:
        name: letters, digits and hyphens, not that of another scheme; a ValueError says so.
        scheme: a subclass of :class:`Scheme`, such as one of :class:`Rotary` with `frequencies` of its own.
    """
    if not isinstance(name, str) or not name.replace("-", "").isalnum():
        raise invalid_argument("name", name, "letters, digits and hyphens")
    if name in _SCHEMES:
        raise invalid_argument("name", name, f"a new one, not one of {', '.join(_SCHEMES)}")
    if not isinstance(scheme, type) or not issubclass(scheme, Scheme):
        raise invalid_argument("scheme", scheme, "a subclass of gape.positions.Scheme")
    _SCHEMES[name] = scheme


def unregister(name: str) -> None:
    """Forget a scheme that :func:`register` made known; a ValueError where there is none of that name."""
    if name in _BUILT_IN or name not in _SCHEMES:
        raise invalid_argument("name", name, "one that gape.positions.register was called with")
    del _SCHEMES[name]


def available() -> list[str]:
    """Every name that :func:`build` takes: the bases, then those that `+gape` may follow."""
    gated = [name + _GATES for name, scheme in _SCHEMES.items() if scheme.refuses_gates is None]
    return [*_SCHEMES, *gated]


def is_gated(name: str) -> bool:
    """Whether a name is that of a scheme with gates; a ValueError where it is not in :func:`available`."""
    return _find(name)[1]


def build(
    name: str,
    *,
    n_heads: int,
    head_dim: int,
    n_kv_heads: int | None = None,
    context_length: float | None = None,
    n_embd: int | None = None,
    **options: Any,
) -> Scheme:
    """Build a positional scheme from its name.

    Args:
        name: one of :func:`available`, such as "rope", "p-rope+gape" or "alibi".
        n_heads, head_dim, n_kv_heads, context_length, n_embd: as in :class:`Scheme`; `+gape`, hope, yarn and longrope
            need context_length, fox n_embd.
        **options: options of the scheme and, after `+gape`, of :class:`gape.GAPEGates`.

    Raises:
        ValueError: unknown name or option, `+gape` where it has no meaning, or a value out of range; the message
            names the argument, what was given and what is expected.
    """
    scheme, gated = _find(name)
    gate_options = keyword_defaults(GAPEGates) if gated else {}
    _refuse_unknown(name, options, [*scheme.options(), *gate_options])
    if options.get("head_positions") is not None:
        options["head_positions"] = _head_schemes(options["head_positions"])
    base = scheme(
        n_heads=n_heads,
        head_dim=head_dim,
        n_kv_heads=n_kv_heads,
        context_length=context_length,
        n_embd=n_embd,
        **{option: value for option, value in options.items() if option not in gate_options},
    )
    if not gated:
        return base
    return Gated(base, **{option: value for option, value in options.items() if option in gate_options})


def _head_schemes(names: Any) -> type[Scheme] | list[type[Scheme]]:
    """The schemes of heads by name, one or several."""
    several = isinstance(names, list | tuple)
    schemes = []
    for name in names if several else [names]:
        rotates = [known for known, kind in _SCHEMES.items() if issubclass(kind, NoPE | Rotary)]
        if name not in rotates:
            raise invalid_argument("head_positions", name, f"one of {', '.join(rotates)}{suggestion(name, rotates)}")
        schemes.append(_SCHEMES[name])
    return schemes if several else schemes[0]


def _find(name: str) -> tuple[type[Scheme], bool]:
    """The base scheme of a name, and whether it has gates."""
    base = name.removesuffix(_GATES) if isinstance(name, str) else name
    gated = base != name
    if not isinstance(base, str) or base not in _SCHEMES:
        meant = suggestion(name, available(), most=3)
        raise invalid_argument("name", name, f"one of {', '.join(available())}{meant}")
    scheme = _SCHEMES[base]
    if gated and scheme.refuses_gates is not None:
        raise invalid_argument("name", name, f"a base that +gape may follow; {base} is none: {scheme.refuses_gates}")
    return scheme, gated


def _refuse_unknown(name: str, options: dict[str, Any], accepted: list[str]) -> None:
    unknown = [option for option in options if option not in accepted]
    if unknown:
        takes = f"the options {', '.join(accepted)}" if accepted else "no options"
        raise ValueError(f"{', '.join(unknown)}: {name} does not take this; it takes {takes}")
