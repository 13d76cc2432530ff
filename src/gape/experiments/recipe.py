"""Experiments as TOML files: read, checked key by key, overridden from the command line, expanded into runs.

A recipe has a `kind` ("niah" where it says none, or "lm"), the sections `task`, `model`, `train`, `evaluation` and
`analysis`, a `sweep` whose lists are multiplied out, and `variants`, named sets of settings that each run through the
sweep. `extends` names a recipe whose keys it takes where it has none of its own. Nothing in a file is ever executed.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gape.experiments.run import DEFAULT_KIND, Run, directory_name, kind_of
from gape.utils.recipe_files import available, find, read
from gape.utils.settings import Settings, flatten, override, parse_value, set_nested
from gape.utils.validation import invalid_argument

#: Runs of a recipe at most: each is built and checked before the first is started.
MOST_RUNS = 10_000
#: Where runs go by default.
RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment: runs of one kind, in the order of the variants, then of the sweep's keys.

    `name` is the file's, without its ending.
    """

    name: str
    runs: tuple[Run, ...]

    def only(self, patterns: Iterable[str]) -> Recipe:
        """The runs whose names fit one of some patterns such as "rope*"; all of them without a pattern."""
        patterns, names = list(patterns), [run.name for run in self.runs]
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise invalid_argument("only", pattern, f"the name of a run or a pattern of them: {', '.join(names)}")
        chosen = {name for pattern in patterns or ["*"] for name in fnmatch.filter(names, pattern)}
        return replace(self, runs=tuple(run for run in self.runs if run.name in chosen))


def load(path: str | Path, overrides: Iterable[str] = (), kind: str | None = None) -> Recipe:
    """Read a recipe: a TOML file, or a name of :func:`gape.utils.recipe_files.available`, of a `kind` if one is named.

    `overrides` are "key=value" with dotted keys and TOML values; what is no TOML value is a string. They win over the
    file, its variants and its sweep: a value for a swept key replaces the list. Errors name the file and the key.
    """
    file, extra = find(path), dict(override(text) for text in overrides)
    settings = read(file)
    try:
        return _expand(file, _with_base(file, settings), extra, kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{error} (recipe {file})") from error


def default_directory(name: str | Path, recipe: Recipe) -> Path:
    """runs/niah/demo for the recipe niah/demo, runs/NAME for a file elsewhere."""
    known = {file: short for short, file in available().items()}
    return RUNS / known.get(find(name).resolve(), recipe.name)


def _with_base(file: Path, settings: Settings, before: tuple[Path, ...] = ()) -> Settings:
    """Settings with those of the recipe that they extend, and of the one which that extends, and so on.

    A recipe overrides the keys of a section one by one, and everything else, `variants` and `sweep` too, as a whole.
    """
    if "extends" not in settings:
        return settings
    own = dict(settings)
    name = parse_value("extends", str, own.pop("extends"))
    beside = file.parent / name
    path = beside if beside.is_file() else find(name, "extends")
    if path.resolve() in (chain := (*before, file.resolve())):
        names = " → ".join(each.stem for each in (*chain, path))
        raise ValueError(f"extends: got {names}, expected a recipe that does not lead back to itself")
    base = _with_base(path, read(path), chain)
    tables = [key for key in base.keys() & own.keys() - {"sweep"} if isinstance(base[key], Mapping)]
    sections = {key: {**base[key], **own[key]} for key in tables if isinstance(own[key], Mapping)}
    return {**base, **own, **sections}


def _expand(file: Path, settings: Settings, extra: Settings, kind: str | None) -> Recipe:
    """The runs of a recipe's settings and of extra ones, which win."""
    directory_name("recipe", file.stem)
    run_class = kind_of(settings.pop("kind", DEFAULT_KIND))
    if kind not in (None, run_class.kind):
        raise ValueError(f"recipe: is for gape {run_class.kind} train, expected one for gape {kind} train")
    parse_value("description", str, settings.pop("description", ""))
    sweep, variants = _sweep(settings.pop("sweep", {})), _variants(settings.pop("variants", []))
    for key in [key for key in extra if key.removeprefix("sweep.") in sweep]:
        value = extra.pop(key)
        sweep[key.removeprefix("sweep.")] = value if isinstance(value, list) else [value]
    count = math.prod(map(len, sweep.values())) * len(variants)
    if count > MOST_RUNS:
        raise ValueError(f"sweep: got {count:,} runs, expected at most {MOST_RUNS:,}")
    runs = []
    for variant, own in variants:
        for values in itertools.product(*sweep.values()):
            chosen = dict(zip(sweep, values, strict=True))
            full = deepcopy(settings)
            for key, value in {**own, **chosen, **extra}.items():
                set_nested(full, key, value)
            runs.append(run_class.build(_run_name(variant, chosen) or file.stem, variant, full))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise invalid_argument("sweep", names, "values that differ, for every run has a directory of its own")
    return Recipe(name=file.stem, runs=tuple(runs))


def _sweep(table: Any) -> dict[str, list[Any]]:
    """The swept keys with their lists; quoted dotted keys and nested tables mean the same."""
    lists: dict[str, list[Any]] = {}
    for key, value in flatten(table, "sweep").items():
        if not isinstance(value, list) or not value:
            raise invalid_argument(f"sweep.{key}", value, "a list of at least one value")
        lists[key] = value
    return lists


def _variants(tables: Any) -> list[tuple[str, Settings]]:
    """Name and settings, by dotted key, of each variant; one without either where there are none."""
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise invalid_argument("variants", tables, "tables written [[variants]], each with a name")
    variants = []
    for table in tables:
        settings = flatten(table, "variants")
        variants.append((parse_value("variants.name", str, settings.pop("name", None)), settings))
    return variants or [("", {})]


def _run_name(variant: str, chosen: Mapping[str, Any]) -> str:
    """A directory name out of what distinguishes a run."""
    parts = [variant] if variant else []
    for key, value in chosen.items():
        parts.append(value if isinstance(value, str) else f"{key.rpartition('.')[2]}{value}")
    return "_".join("".join(c if c.isalnum() or c in "+-._" else "-" for c in part) for part in parts)
