"""Schemes and targets: their names in tables and figures, their order, and records grouped by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
K = TypeVar("K")

NAMES = {
    "nope": "NoPE", "rope": "RoPE", "p-rope": "p-RoPE", "pi": "PI", "ntk": "NTK", "yarn": "YaRN",
    "longrope": "LongRoPE", "alibi": "ALiBi", "kerple": "KERPLE", "fire": "FIRE", "t5": "T5", "fox": "FoX",
    "hope": "HoPE", "grape": "GRAPE", "swan": "SWAN",
}  # fmt: skip
#: Bases in the order of tables and legends; others follow by name.
BASES = ("nope", "rope", "p-rope", "yarn", "alibi", "fox")
#: Needles in the order of tables and panels.
TARGETS = {"last": "Needle close (last)", "first": "Needle far (first)", "middle": "Needle in the middle"}


def base_of(position: str) -> str:
    """The scheme without gates."""
    return position.removesuffix("+gape")


def label(position: str, evaluated: str | None = None) -> str:
    """A scheme as the paper writes it, with what it was switched to for evaluation."""
    base = base_of(position)
    text = NAMES.get(base, base) + ("+GAPE" if base != position else "")
    if evaluated in (None, position):
        return text
    other = base_of(str(evaluated))
    return f"{text}, {NAMES.get(other, other)} at evaluation"


def variant_of(record: Mapping[str, Any]) -> str:
    """What a variant's name adds to the scheme's, which many of them begin with."""
    return str(record.get("variant") or "").removeprefix(record["position"]).strip("_- ")


def name(record: Mapping[str, Any]) -> str:
    """The scheme of a language model as the paper writes it, with its variant in brackets."""
    variant = variant_of(record)
    return label(record["position"]) + (f" ({variant})" if variant else "")


def join_names(*parts: str) -> str:
    """Variant, scheme and target of the needle task in one name; empty ones left out."""
    return " · ".join(filter(None, parts))


def scheme_order(position: str) -> tuple[int, str, bool]:
    """Sorts schemes: by base, the gated one after it."""
    base = base_of(position)
    return (BASES.index(base) if base in BASES else len(BASES), base, base != position)


def group_by(records: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Records by a key, in the order in which the keys first appear."""
    groups: dict[K, list[T]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def by_scheme(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Records by (position, variant): bases in the order of tables, gated ones after them, plain before variants."""
    groups = group_by(records, lambda record: (record["position"], variant_of(record)))
    return dict(sorted(groups.items(), key=lambda item: (scheme_order(item[0][0]), item[0][1])))
