"""Recipes by name or by path, with what the command line says, as lists of runs."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from gape.experiments.recipes.run import DEFAULT_KIND, Run, directory_name, kind_of
from gape.experiments.recipes.tables import Settings, override, place, run_name, swept, typed, variants
from gape.utils.validation import invalid_argument, suggestion

#: Runs of a recipe at most: each is built and checked before the first is started.
MOST_RUNS = 10_000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment: a list of runs.

    `runs` come in the order of the variants, then of the sweep's keys; `name` is the file's, without its ending; all
    are of one `kind`.
    """

    name: str
    description: str
    kind: str
    runs: tuple[Run, ...]

    def only(self, patterns: Iterable[str]) -> Recipe:
        """The runs whose names fit one of some patterns such as "rope*"; all of them without a pattern.

        Raises:
            ValueError: a pattern that no run fits; says which runs there are.
        """
        wanted = list(patterns)
        names = [run.name for run in self.runs]
        for pattern in wanted:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise invalid_argument("only", pattern, f"the name of a run or a pattern of them: {', '.join(names)}")
        kept = [run for run in self.runs if not wanted or any(fnmatchcase(run.name, pattern) for pattern in wanted)]
        return replace(self, runs=tuple(kept))


def load(path: str | Path, overrides: Iterable[str] = (), kind: str | None = None) -> Recipe:
    """Read a recipe.

    Args:
        path: a TOML file, or a name of :func:`available`.
        overrides: "key=value" with dotted keys and TOML values, such as "train.max_steps=100"; what is no TOML value
            is taken as a string. They win over the file, its variants and its sweep: a value for a swept key
            replaces the list.
        kind: refuse a recipe of another kind than "niah" or "lm".

    Raises:
        ValueError: a file that is missing or no TOML, an unknown key (with the nearest known one), a value of wrong
            type or out of range; names the key.
    """
    file, given = find(path), dict(override(text) for text in overrides)
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a TOML file: {error}") from error
    try:
        return _expanded(file, settings, given, kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{error} (recipe {file})") from error


def _expanded(file: Path, settings: Settings, given: Settings, kind: str | None) -> Recipe:
    """The runs of a recipe's settings and of those given beside it."""
    directory_name("recipe", file.stem)
    made = kind_of(settings.pop("kind", DEFAULT_KIND))
    if kind not in (None, made.kind):
        raise ValueError(f"recipe: is for gape {made.kind} train, expected one for gape {kind} train")
    description = typed("description", str, settings.pop("description", ""))
    sweep, fixed = swept(settings.pop("sweep", {})), variants(settings.pop("variants", []))
    for key in [key for key in given if key.removeprefix("sweep.") in sweep]:
        value = given.pop(key)
        sweep[key.removeprefix("sweep.")] = value if isinstance(value, list) else [value]
    count = math.prod(map(len, sweep.values())) * len(fixed)
    if count > MOST_RUNS:
        raise ValueError(f"sweep: got {count:,} runs, expected at most {MOST_RUNS:,}")
    runs = []
    for variant, own in fixed:
        for values in itertools.product(*sweep.values()):
            chosen = dict(zip(sweep, values, strict=True))
            full = deepcopy(settings)
            for key, value in {**own, **chosen, **given}.items():
                place(full, key, value)
            runs.append(made.build(run_name(variant, chosen) or file.stem, variant, full))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise invalid_argument("sweep", names, "values that differ, for every run has a directory of its own")
    return Recipe(name=file.stem, description=description, kind=made.kind, runs=tuple(runs))


def find(path: str | Path) -> Path:
    """The file of a recipe given by its path or by a name of :func:`available`.

    Raises:
        ValueError: there is none; says which there are.
    """
    if Path(path).is_file():
        return Path(path)
    known = available()
    name = str(path).removesuffix(".toml").removeprefix("recipes/")
    if name in known:
        return known[name]
    meant = suggestion(name, known, before=", ")
    raise ValueError(f"recipe: got {str(path)!r}, expected a TOML file or one of {', '.join(known)}{meant}")


#: Folders of recipes that train; others hold recipes of other commands.
_FOLDERS = ("niah", "lm")


def available() -> dict[str, Path]:
    """The recipes that come with the library, by name such as "niah/demo"."""
    package = Path(__file__).resolve().parents[2]
    # In a source tree they lie beside src/, in an installed package inside it.
    for root in (package / "_recipes", package.parents[1] / "recipes"):
        if root.is_dir():
            files = [file for folder in _FOLDERS for file in sorted((root / folder).rglob("*.toml"))]
            return {str(file.relative_to(root).with_suffix("").as_posix()): file for file in files}
    return {}
