"""A training run with everything it needs, checked: what runs of every kind have in common."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from gape.experiments.recipes.tables import Settings, listed, refuse_unknown, section, typed
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.train.config import TrainConfig
from gape.utils.validation import invalid_argument, suggestion, whole

#: The kind of a recipe that does not say one.
DEFAULT_KIND = "niah"
#: Bytes of a run's name; file systems take 255 at most.
LONGEST_NAME = 200
_KINDS: dict[str, type[Run]] = {}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. A subclass per kind of experiment adds its sections, `task` among them.

    Attributes:
        name: unique within the recipe; a directory name.
        variant: the variant's name, "" without one.
        seed: of the weights, the data and the random states.
        device: "auto", "cpu", "cuda", …
        batch_size: sequences of a micro-batch.
        task: what is learned from, a dataclass with a `length`, the tokens of a training sequence.
        model, train: of the model and of the trainer.
    """

    #: What a recipe calls this kind of experiment.
    kind: ClassVar[str] = ""
    #: Keys outside the sections, and the classes of the sections.
    top: ClassVar[Mapping[str, type[Any]]] = {"seed": int, "device": str, "batch_size": int}
    sections: ClassVar[Mapping[str, type[Any]]] = {}

    name: str
    variant: str = ""
    seed: int = 0
    device: str = "auto"
    batch_size: int = 64
    task: Any
    model: GPTConfig
    train: TrainConfig

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        directory_name("name", self.name)
        whole("batch_size", self.batch_size)
        buildable(self.model)

    @classmethod
    def taken(cls, task: Any, seed: int) -> dict[str, Settings]:
        """By section, values that follow from the task or the seed and cannot be set."""
        return {"train": {"seed": seed}}

    @classmethod
    def defaults(cls, task: Any) -> dict[str, Settings]:
        """By section, values that follow from the task unless they are set."""
        return {}

    @classmethod
    def build(cls, name: str, variant: str, settings: Mapping[str, Any]) -> Self:
        """Check settings against the classes of the sections and make a run of them.

        Raises:
            ValueError: an unknown or missing key, or a value that is refused.
        """
        refuse_unknown("", settings, [*cls.top, *cls.sections])
        top = {key: typed(key, kind, settings[key]) for key, kind in cls.top.items() if key in settings}
        task = section("task", cls.sections["task"], settings.get("task", {}))
        taken, defaults = cls.taken(task, top.get("seed", 0)), cls.defaults(task)
        others = {}
        for key, kind in cls.sections.items():
            given = settings.get(key, {})
            if isinstance(given, Mapping):
                given = {**defaults.get(key, {}), **given}
            if key != "task":
                others[key] = section(key, kind, given, taken.get(key))
        return cls(name=name, variant=variant, task=task, **top, **others)

    def to_dict(self) -> Settings:
        """Every setting with its value, in the types JSON has; :meth:`from_dict` reads it."""
        settings: Settings = {} if self.kind == DEFAULT_KIND else {"kind": self.kind}
        settings |= {name: getattr(self, name) for name in ("name", "variant", *self.top)}
        taken = self.taken(self.task, self.seed)
        for key in self.sections:
            values = listed(dataclasses.asdict(getattr(self, key)))
            settings[key] = {name: value for name, value in values.items() if name not in taken.get(key, {})}
        return settings

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> Run:
        """The run, of whatever kind, that :meth:`to_dict` described.

        Raises:
            ValueError: an unknown kind, an unknown or missing key, or a value that is refused.
        """
        rest = {key: value for key, value in settings.items() if key not in ("name", "variant", "kind")}
        kind = kind_of(settings.get("kind", DEFAULT_KIND))
        name, variant = (typed(key, str, settings.get(key, "")) for key in ("name", "variant"))
        return kind.build(name, variant, rest)


def directory_name(key: str, name: str) -> None:
    """Refuse what is no name for a directory beside others; those that begin with a dot mean something already."""
    if name[:1] in ("", ".") or len(name.encode()) > LONGEST_NAME or not set("/\\\0").isdisjoint(name):
        raise invalid_argument(key, name, f"one for a directory: no slash, no dot first, at most {LONGEST_NAME} bytes")


def kind_of(name: Any) -> type[Run]:
    """The class of runs that a recipe's `kind` names.

    Raises:
        ValueError: there is none; says which there are.
    """
    if not isinstance(name, str) or name not in _KINDS:
        raise invalid_argument("kind", name, f"one of {', '.join(_KINDS)}{suggestion(str(name), _KINDS, before=', ')}")
    return _KINDS[name]


@functools.lru_cache
def buildable(config: GPTConfig) -> None:
    """Refuse options that only a scheme knows; on the meta device building it costs next to nothing."""
    try:
        with torch.device("meta"):
            GPT(config)
    except ValueError as error:
        raise ValueError(f"model.options: {error}") from error
