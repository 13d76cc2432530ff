"""Named corpora: a TOML file of the settings of `gape data prepare`, with every key explained in place."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

from gape.data.config import PrepareConfig
from gape.utils.validation import suggestion

ENDING = ".toml"


def available() -> dict[str, Path]:
    """The recipes that come with the library, by name such as "data/fineweb"."""
    here = Path(__file__).resolve().parents[1]
    # In a source tree they lie beside src/, in an installed package inside it.
    for root in (here / "_recipes", here.parents[1] / "recipes"):
        if root.is_dir():
            return {f"data/{file.stem}": file for file in sorted((root / "data").glob(f"*{ENDING}"))}
    return {}


def is_recipe(name: str) -> bool:
    """Whether an input names a recipe: one of those there are, or a TOML file."""
    return name.endswith(ENDING) or (name in available() and not Path(name).exists())


def load(name: str) -> dict[str, Any]:
    """The settings in a recipe, as arguments of :class:`PrepareConfig`.

    Raises:
        ValueError: no such file, no TOML, an unknown key or a value of the wrong type.
    """
    file = available().get(name.removesuffix(ENDING).removeprefix("recipes/"), Path(name))
    if not file.is_file():
        raise ValueError(f"recipe: got {name!r}, expected a TOML file or one of {', '.join(available())}")
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a TOML file: {error}") from error
    settings.pop("description", None)
    return {key: _typed(key, value) for key, value in settings.items()}


def _typed(key: str, value: Any) -> Any:
    """The value as the setting wants it: lists become tuples, whole numbers floats."""
    hints = typing.get_type_hints(PrepareConfig)
    known = [field.name for field in dataclasses.fields(PrepareConfig)]
    if key not in known:
        meant = suggestion(key, known, before=", ")
        raise ValueError(f"{key}: unknown key{meant}; known are {', '.join(known)}")
    hint = hints[key]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if isinstance(value, list) and all(type(item) is inner for item in value):
            return tuple(value)
    elif float in kinds and type(value) in (int, float):
        return float(value)
    elif type(value) in kinds:
        return value
    raise ValueError(f"{key}: got {value!r}, expected {hint}")
