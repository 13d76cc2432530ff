"""Experiments as TOML files: read, checked key by key, overridden from the command line, expanded into runs.

A recipe has the sections `task`, `model`, `train`, `evaluation` and `analysis`, a `sweep` whose lists are multiplied
out, and `variants`, named sets of settings that each run through the sweep. Nothing in a file is ever executed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gape.models.gpt import GPT, GPTConfig
from gape.ops.checks import refuse, whole
from gape.tasks.niah import VOCAB_SIZE, NIAHConfig
from gape.train.config import TrainConfig

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How a trained model is measured.

    Attributes:
        factors: multiples of the training length; the number of needles grows with them.
        samples: sequences per length.
        validation_samples: sequences of a validation during training, none of which is used afterwards.
        seed: which sequences; the same for every run, so that runs can be compared pair by pair.
        switch: scheme in training → scheme that the same weights are evaluated with as well, such as rope → yarn.
        switch_options: options of the schemes switched to.
    """

    factors: tuple[int, ...] = (1, 2, 4)
    samples: int = 1000
    validation_samples: int = 1000
    seed: int = 0
    switch: Mapping[str, str] = field(default_factory=dict)
    switch_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _multiples(self.factors)
        whole("samples", self.samples)
        whole("validation_samples", self.validation_samples)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What is looked at inside a trained model.

    Attributes:
        samples: sequences; 0 leaves the analysis out.
        factors: multiples of the training length at which attention entropy is taken, 1 among them.
        traces: whether the landmarks along one sequence are kept.
        map_size: cells along each side of the attention maps that are kept; 0 keeps none.
        seeds: the runs whose traces and maps are kept; all when empty.
    """

    samples: int = 10
    factors: tuple[int, ...] = (1, 2, 4)
    traces: bool = True
    map_size: int = 64
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        _multiples(self.factors)
        whole("samples", self.samples, 0)
        whole("map_size", self.map_size, 0)
        if 1 not in self.factors:
            raise refuse("factors", self.factors, "multiples with 1 among them, where gates are read")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run with everything it needs, checked.

    Attributes:
        name: unique within the recipe; a directory name.
        variant: the variant's name, "" without one.
        seed: of the weights, the data and the random states.
        device: "auto", "cpu", "cuda", …
        batch_size: sequences of a micro-batch.
        task, model, train, evaluation, analysis: the sections.
    """

    name: str
    variant: str = ""
    seed: int = 0
    device: str = "auto"
    batch_size: int = 64
    task: NIAHConfig
    model: GPTConfig
    train: TrainConfig
    evaluation: Evaluation
    analysis: Analysis

    def __post_init__(self) -> None:
        whole("batch_size", self.batch_size)
        for config in filter(None, (self.model, self.switched)):
            _buildable(config)

    @property
    def switched(self) -> GPTConfig | None:
        """The model with the scheme it is evaluated with as well, None where there is none."""
        other = self.evaluation.switch.get(self.model.position)
        if other is None:
            return None
        options = {**self.model.options, **self.evaluation.switch_options}
        return dataclasses.replace(self.model, position=other, options=options)

    def to_dict(self) -> Settings:
        """Every setting with its value, in the types JSON has; :func:`Run.from_dict` reads it."""
        settings: Settings = {name: getattr(self, name) for name in ("name", "variant", *_TOP)}
        for section in _SECTIONS:
            values = _listed(dataclasses.asdict(getattr(self, section)))
            settings[section] = {key: value for key, value in values.items() if key not in _TAKEN.get(section, ())}
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Run:
        """The run that :func:`Run.to_dict` described.

        Raises:
            ValueError: an unknown or missing key, or a value that is refused.
        """
        rest = {key: value for key, value in settings.items() if key not in ("name", "variant")}
        return _run(str(settings["name"]), str(settings.get("variant", "")), rest)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment: a list of runs.

    `runs` come in the order of the variants, then of the sweep's keys; `name` is the file's, without its ending.
    """

    name: str
    description: str
    runs: tuple[Run, ...]


def load(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: a TOML file, or a name of :func:`available`.
        overrides: "key=value" with dotted keys and TOML values, such as "train.max_steps=100"; what is no TOML value
            is taken as a string. They win over the file, its variants and its sweep: a value for a swept key
            replaces the list.

    Raises:
        ValueError: a file that is missing or no TOML, an unknown key (with the nearest known one), a value of wrong
            type or out of range; names the key.
    """
    file = find(path)
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not a TOML file: {error}") from error
    given = dict(_override(text) for text in overrides)
    description = _typed("description", str, settings.pop("description", ""))
    sweep, variants = _sweep(settings.pop("sweep", {})), _variants(settings.pop("variants", []))
    for key in [key for key in given if key.removeprefix("sweep.") in sweep]:
        value = given.pop(key)
        sweep[key.removeprefix("sweep.")] = value if isinstance(value, list) else [value]
    runs = []
    for variant, fixed in variants:
        for values in itertools.product(*sweep.values()):
            chosen = dict(zip(sweep, values, strict=True))
            full = deepcopy(settings)
            for key, value in {**fixed, **chosen, **given}.items():
                _place(full, key, value)
            runs.append(_run(_name(variant, chosen) or file.stem, variant, full))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise refuse("sweep", names, "values that differ, for every run has a directory of its own")
    return Recipe(name=file.stem, description=description, runs=tuple(runs))


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
    raise ValueError(
        f"recipe: got {str(path)!r}, expected a TOML file or one of {', '.join(known)}{_hint(name, known)}"
    )


def available() -> dict[str, Path]:
    """The recipes that come with the library, by name such as "niah/demo"."""
    here = Path(__file__).resolve().parent
    # In a source tree they lie beside src/, in an installed package inside it.
    for root in (here / "_recipes", here.parents[1] / "recipes"):
        if root.is_dir():
            return {
                str(file.relative_to(root).with_suffix("").as_posix()): file for file in sorted(root.rglob("*.toml"))
            }
    return {}


#: Keys of a run outside its sections, and the classes of the sections.
_TOP = {"seed": int, "device": str, "batch_size": int}
_SECTIONS: dict[str, type[Any]] = {
    "task": NIAHConfig,
    "model": GPTConfig,
    "train": TrainConfig,
    "evaluation": Evaluation,
    "analysis": Analysis,
}
#: What follows from elsewhere: the vocabulary and the training length are the task's, the seed is the run's.
_TAKEN = {"model": ("vocab_size", "context_length"), "train": ("seed",)}


def _run(name: str, variant: str, settings: Mapping[str, Any]) -> Run:
    """Check settings against the classes of the sections and build a run from them."""
    _refuse_unknown("", settings, [*_TOP, *_SECTIONS])
    top = {key: _typed(key, kind, settings[key]) for key, kind in _TOP.items() if key in settings}
    seed = top.get("seed", 0)
    task = _section("task", settings.get("task", {}))
    taken = {"model": {"vocab_size": VOCAB_SIZE, "context_length": task.length}, "train": {"seed": seed}}
    others = {
        section: _section(section, settings.get(section, {}), taken.get(section, {}))
        for section in _SECTIONS
        if section != "task"
    }
    return Run(name=name, variant=variant, task=task, **top, **others)


def _section(section: str, values: Any, taken: Mapping[str, Any] | None = None) -> Any:
    """An object of the section's class from its table."""
    if not isinstance(values, Mapping):
        raise refuse(section, values, "a table of settings")
    kind, taken = _SECTIONS[section], taken or {}
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name in values:
        if name in taken:
            raise ValueError(f"{section}.{name}: cannot be set here, it follows from the task or the seed")
    _refuse_unknown(f"{section}.", values, [name for name in fields if name not in taken])
    needed = [name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    for name in needed:
        if name not in values and name not in taken:
            raise ValueError(f"{section}.{name}: got nothing, expected {_described(hints[name])}")
    typed = {name: _typed(f"{section}.{name}", hints[name], value) for name, value in values.items()}
    try:
        return kind(**(typed | dict(taken)))
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from error


def _typed(path: str, hint: Any, value: Any) -> Any:
    """The value as the annotation wants it: whole numbers become floats, lists become tuples, nothing else changes.

    Raises:
        ValueError: it is of another type; names the key.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        # Only "this or None" occurs.
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _typed(path, inner, value)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_typed(f"{path}[{at}]", arguments[0], item) for at, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {str(key): _typed(f"{path}.{key}", arguments[1], item) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Any or (
        isinstance(hint, type) and isinstance(value, hint) and isinstance(value, bool) == (hint is bool)
    ):
        return value
    raise refuse(path, value, _described(hint))


def _described(hint: Any) -> str:
    """An annotation in words."""
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _described(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        return f"a list, each {_described(arguments[0])}"
    return words.get(hint, "a table of settings")


def _override(text: str) -> tuple[str, Any]:
    """The key and the value of "key=value"."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise refuse("override", text, "key=value, such as train.max_steps=100")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _place(settings: Settings, key: str, value: Any) -> None:
    """Put a value under a dotted key, making tables on the way."""
    *tables, last = key.split(".")
    for depth, name in enumerate(tables):
        settings = settings.setdefault(name, {})
        if not isinstance(settings, dict):
            raise refuse(".".join(tables[: depth + 1]), settings, "a table of settings")
    settings[last] = value


def _sweep(table: Any) -> dict[str, list[Any]]:
    """The swept keys with their lists; quoted dotted keys and nested tables mean the same."""
    lists: dict[str, list[Any]] = {}
    for key, value in _flat(table, "sweep").items():
        if not isinstance(value, list) or not value:
            raise refuse(f"sweep.{key}", value, "a list of at least one value")
        lists[key] = value
    return lists


def _variants(tables: Any) -> list[tuple[str, Settings]]:
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise refuse("variants", tables, "tables written [[variants]], each with a name")
    made = []
    for table in tables:
        settings = _flat(table, "variants")
        made.append((_typed("variants.name", str, settings.pop("name", None)), settings))
    return made or [("", {})]


def _flat(table: Any, path: str) -> Settings:
    """Nested tables as one table with dotted keys."""
    if not isinstance(table, Mapping):
        raise refuse(path, table, "a table of settings")
    flat: Settings = {}
    for key, value in table.items():
        inner = _flat(value, path) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{key}.{name}" if name else key: v for name, v in inner.items()}
    return flat


def _name(variant: str, chosen: Mapping[str, Any]) -> str:
    """A directory name out of what distinguishes a run."""
    parts = [variant] if variant else []
    for key, value in chosen.items():
        parts.append(value if isinstance(value, str) else f"{key.rpartition('.')[2]}{value}")
    return "_".join("".join(c if c.isalnum() or c in "+-._" else "-" for c in part) for part in parts)


def _refuse_unknown(prefix: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in values:
        if key not in known:
            raise ValueError(f"{prefix}{key}: unknown key{_hint(key, known, prefix)}; known are {', '.join(known)}")


def _hint(key: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f", did you mean {prefix}{close[0]}?" if close else ""


@functools.lru_cache
def _buildable(config: GPTConfig) -> None:
    """Refuse options that only a scheme knows; on the meta device building it costs next to nothing."""
    try:
        with torch.device("meta"):
            GPT(config)
    except ValueError as error:
        raise ValueError(f"model.options: {error}") from error


def _multiples(factors: Sequence[int]) -> None:
    if not factors:
        raise refuse("factors", factors, "at least one multiple of the training length")
    for factor in factors:
        whole("factors", factor)


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _listed(v) for key, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, (list, tuple)) else value
