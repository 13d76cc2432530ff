"""Recipes that come with the library: TOML files of settings, by name. Imports no torch: wrong names end at once."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gape.utils.validation import suggestion

#: Folders of recipes that train; "data" holds those of `gape data prepare`.
TRAINING = ("niah", "lm")
ENDING = ".toml"


def available(folders: Sequence[str] = TRAINING) -> dict[str, Path]:
    """The recipes in some folders, by name such as "niah/demo"."""
    package = Path(__file__).resolve().parents[1]
    # In a source tree they lie beside src/, in an installed package inside it.
    for root in (package / "_recipes", package.parents[1] / "recipes"):
        if root.is_dir():
            files = [file for folder in folders for file in sorted((root / folder).rglob(f"*{ENDING}"))]
            return {str(file.relative_to(root).with_suffix("").as_posix()): file for file in files}
    return {}


def find(path: str | Path, key: str = "recipe", folders: Sequence[str] = TRAINING) -> Path:
    """The file of a recipe given by its path or by a name of :func:`available`; an error names `key`."""
    if Path(path).is_file():
        return Path(path)
    known = available(folders)
    name = str(path).removesuffix(ENDING).removeprefix("recipes/")
    if name in known:
        return known[name]
    meant = suggestion(name, known, before=", ")
    raise ValueError(f"{key}: got {str(path)!r}, expected a TOML file or one of {', '.join(known)}{meant}")


def read(file: Path) -> dict[str, Any]:
    """The settings in a TOML file; a ValueError where it is none."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a TOML file: {error}") from error
