"""Settings checked against dataclasses: unknown keys, missing ones and values of another type are named."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from gape.utils.validation import invalid_argument, suggestion

Settings = dict[str, Any]


def section(name: str, kind: type[Any], values: Any, taken: Mapping[str, Any] | None = None) -> Any:
    """An object of a section's dataclass from its table; `taken` follows from elsewhere and may not be set."""
    if not isinstance(values, Mapping):
        raise invalid_argument(name, values, "a table of settings")
    taken = taken or {}
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in values:
        if key in taken:
            raise ValueError(f"{name}.{key}: cannot be set here, it follows from the task or the seed")
    refuse_unknown(f"{name}.", values, [key for key in fields if key not in taken])
    needed = [key for key, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    for key in needed:
        if key not in values and key not in taken:
            raise ValueError(f"{name}.{key}: got nothing, expected {describe_type(hints[key])}")
    checked = {key: parse_value(f"{name}.{key}", hints[key], value) for key, value in values.items()}
    try:
        return kind(**(checked | dict(taken)))
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error


def parse_value(path: str, hint: Any, value: Any) -> Any:
    """The value as the annotation wants it: whole numbers become floats, lists become tuples, nothing else changes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        # Only "this or None" occurs.
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else parse_value(path, inner, value)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(parse_value(f"{path}[{at}]", arguments[0], item) for at, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {str(key): parse_value(f"{path}.{key}", arguments[1], item) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Any or (
        isinstance(hint, type) and isinstance(value, hint) and isinstance(value, bool) == (hint is bool)
    ):
        return value
    raise invalid_argument(path, value, describe_type(hint))


def describe_type(hint: Any) -> str:
    """An annotation in words."""
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return describe_type(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        return f"a list, each {describe_type(arguments[0])}"
    return words.get(hint, "a table of settings")


def override(text: str) -> tuple[str, Any]:
    """The key and the value of "key=value"; what is no TOML value is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise invalid_argument("override", text, "key=value, such as train.max_steps=100")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
    except RecursionError as error:
        raise ValueError(f"{key.strip()}: lists nested too deeply") from error


def set_nested(settings: Settings, key: str, value: Any) -> None:
    """Put a value under a dotted key, making tables on the way."""
    *tables, last = key.split(".")
    for depth, name in enumerate(tables):
        settings = settings.setdefault(name, {})
        if not isinstance(settings, dict):
            raise invalid_argument(".".join(tables[: depth + 1]), settings, "a table of settings")
    settings[last] = value


def refuse_unknown(prefix: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse keys that are not among the known ones, with the nearest of those."""
    for key in values:
        if key not in known:
            meant = suggestion(key, known, before=", ", prefix=prefix)
            raise ValueError(f"{prefix}{key}: unknown key{meant}; known are {', '.join(known)}")


def to_lists(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: to_lists(v) for key, v in value.items()}
    return [to_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def flatten(table: Any, path: str = "settings") -> Settings:
    """Nested tables as one table with dotted keys."""
    if not isinstance(table, Mapping):
        raise invalid_argument(path, table, "a table of settings")
    entries: Settings = {}
    for key, value in table.items():
        inner = flatten(value, path) if isinstance(value, Mapping) else {"": value}
        entries |= {f"{key}.{name}" if name else key: v for name, v in inner.items()}
    return entries
