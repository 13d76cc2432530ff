"""A training run with all its settings, checked: :class:`NeedleRun` and :class:`LanguageRun`.

Each section of a recipe is a dataclass. The docstrings here explain every key that is not the model's, the trainer's
or the needle task's.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from gape.data.recall import RecallConfig
from gape.data.recall_texts import Request
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.tasks.niah import VOCAB_SIZE, NIAHConfig
from gape.tasks.perplexity import Protocol
from gape.train.config import TrainConfig
from gape.utils.jsonl import Record
from gape.utils.settings import Settings, parse_value, refuse_unknown, section, to_lists
from gape.utils.validation import invalid_argument, suggestion, whole

#: The kind of a recipe that does not say one.
DEFAULT_KIND = "niah"
#: Bytes of a run's name; file systems take 255 at most.
LONGEST_NAME = 200


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. A subclass per kind of experiment adds its sections, which are dataclasses, `task` among them.

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

    name: str
    variant: str = ""
    seed: int = 0
    device: str = "auto"
    batch_size: int = 64
    task: Any
    model: GPTConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        directory_name("name", self.name)
        whole("batch_size", self.batch_size)
        buildable(self.model)

    @property
    def identity(self) -> Record:
        """What names the run in rows and analyses."""
        return {
            "run": self.name, "variant": self.variant, "position": self.model.position, "seed": self.seed,
            "train_length": self.task.length,
        }  # fmt: skip

    @classmethod
    @functools.cache
    def keys(cls) -> tuple[dict[str, Any], dict[str, Any]]:
        """The types of the keys outside the sections, and the classes of the sections."""
        hints = typing.get_type_hints(cls)
        own = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name not in ("name", "variant")}
        sections = {name: kind for name, kind in own.items() if dataclasses.is_dataclass(kind)}
        return {name: kind for name, kind in own.items() if name not in sections}, sections

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
        """Check settings against the classes of the sections and make a run of them."""
        plain, sections = cls.keys()
        refuse_unknown("", settings, [*plain, *sections])
        top = {key: parse_value(key, kind, settings[key]) for key, kind in plain.items() if key in settings}
        task = section("task", sections["task"], settings.get("task", {}))
        taken, defaults = cls.taken(task, top.get("seed", 0)), cls.defaults(task)
        others = {}
        for key, kind in sections.items():
            table = settings.get(key, {})
            if isinstance(table, Mapping):
                table = {**defaults.get(key, {}), **table}
            if key != "task":
                others[key] = section(key, kind, table, taken.get(key))
        return cls(name=name, variant=variant, task=task, **top, **others)

    def to_dict(self) -> Settings:
        """Every setting with its value, in the types JSON has; :meth:`from_dict` reads it."""
        settings: Settings = {} if self.kind == DEFAULT_KIND else {"kind": self.kind}
        settings |= {name: getattr(self, name) for name in ("name", "variant", *self.keys()[0])}
        taken = self.taken(self.task, self.seed)
        for key in self.keys()[1]:
            values = to_lists(dataclasses.asdict(getattr(self, key)))
            settings[key] = {name: value for name, value in values.items() if name not in taken.get(key, {})}
        return settings

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> Run:
        """The run, of whatever kind, that :meth:`to_dict` described."""
        rest = {key: value for key, value in settings.items() if key not in ("name", "variant", "kind")}
        name, variant = (parse_value(key, str, settings.get(key, "")) for key in ("name", "variant"))
        return kind_of(settings.get("kind", DEFAULT_KIND)).build(name, variant, rest)


def directory_name(key: str, name: str) -> None:
    """Refuse what is no name for a directory beside others; those that begin with a dot mean something already."""
    if name[:1] in ("", ".") or len(name.encode()) > LONGEST_NAME or not set("/\\\0").isdisjoint(name):
        raise invalid_argument(key, name, f"one for a directory: no slash, no dot first, at most {LONGEST_NAME} bytes")


def kind_of(name: Any) -> type[Run]:
    """The class of runs that a recipe's `kind` names."""
    kinds: dict[Any, type[Run]] = {kind.kind: kind for kind in (NeedleRun, LanguageRun)}
    if not isinstance(name, str) or name not in kinds:
        raise invalid_argument("kind", name, f"one of {', '.join(kinds)}{suggestion(str(name), kinds, before=', ')}")
    return kinds[name]


@functools.lru_cache
def buildable(config: GPTConfig) -> None:
    """Refuse options that only a scheme knows; on the meta device building it costs next to nothing."""
    try:
        with torch.device("meta"):
            GPT(config)
    except ValueError as error:
        raise ValueError(f"model.options: {error}") from error


@dataclass(frozen=True, kw_only=True)
class NeedleEvaluation:
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
class NeedleAnalysis:
    """What is analysed inside a trained model.

    Attributes:
        samples: sequences; 0 leaves the analysis out.
        factors: multiples of the training length at which attention entropy is taken, 1 among them.
        seeds: the runs of which the landmarks along one sequence are kept; all when empty.
    """

    samples: int = 10
    factors: tuple[int, ...] = (1, 2, 4)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        _multiples(self.factors)
        whole("samples", self.samples, 0)
        if 1 not in self.factors:
            raise invalid_argument("factors", self.factors, "multiples with 1 among them, where gates are read")


@dataclass(frozen=True, kw_only=True)
class NeedleRun(Run):
    """A run on the needle task."""

    kind: ClassVar[str] = "niah"

    task: NIAHConfig
    evaluation: NeedleEvaluation
    analysis: NeedleAnalysis

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.switched is not None:
            buildable(self.switched)

    @classmethod
    def taken(cls, task: NIAHConfig, seed: int) -> dict[str, Settings]:
        """The vocabulary and the training length are the task's, the seed is the run's."""
        return {**super().taken(task, seed), "model": {"vocab_size": VOCAB_SIZE, "context_length": task.length}}

    @property
    def identity(self) -> Record:
        """Also the needle that is asked for."""
        return super().identity | {"target": self.task.target}

    @property
    def switched(self) -> GPTConfig | None:
        """The model with the scheme it is evaluated with as well, None where there is none."""
        other = self.evaluation.switch.get(self.model.position)
        if other is None:
            return None
        options = {**self.model.options, **self.evaluation.switch_options}
        return dataclasses.replace(self.model, position=other, options=options)


def _multiples(factors: Sequence[int]) -> None:
    if not factors:
        raise invalid_argument("factors", factors, "at least one multiple of the training length")
    for factor in factors:
        whole("factors", factor)


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """What is read in training.

    Attributes:
        length: tokens of a training window, which lies inside one document.
        stratum: train on documents of this stratum only; on all when None.
    """

    length: int = 1024
    stratum: str | None = None

    def __post_init__(self) -> None:
        whole("length", self.length, 2)


@dataclass(frozen=True, kw_only=True)
class LanguageEvaluation:
    """How a model is measured on held-out documents.

    Attributes:
        validation_windows: windows of the training length per validation, the same ones every time.
        contexts: lengths at which perplexity is measured after training; none when empty.
        last, align: as in :class:`gape.tasks.perplexity.Protocol`.
        max_windows: windows per context at most.
        seed: which windows; the same for every run, so that runs can be compared window by window.
        chunk: tokens that go through the model at once; longer windows are read with a cache.
        recall_samples: recall texts per context, for each distance of a fact and for several facts; 0 measures none.
        recall_facts: facts of a text that asks for several.
        new_tokens: generated behind a text of each context, timed; 0 generates none.
    """

    validation_windows: int = 256
    contexts: tuple[int, ...] = ()
    last: int = 512
    align: int = 0
    max_windows: int = 8000
    seed: int = 0
    chunk: int = 16384
    recall_samples: int = 0
    recall_facts: int = 4
    new_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("validation_windows", "max_windows", "chunk"):
            whole(name, getattr(self, name))
        for name in ("seed", "recall_samples", "new_tokens"):
            whole(name, getattr(self, name), 0)
        Request(facts=self.recall_facts)
        for context in self.contexts:
            self.at(context)

    def at(self, context: int) -> Protocol:
        """The protocol at one context."""
        return Protocol(context=context, last=self.last, align=self.align)


@dataclass(frozen=True, kw_only=True)
class LanguageAnalysis:
    """What is analysed inside the model during training.

    Attributes:
        routing_every: updates between records of the gates, from 0 on; 0 records none.
        routing_windows: held-out windows of the training length that gates are averaged over, the same ones every time.
    """

    routing_every: int = 0
    routing_windows: int = 8

    def __post_init__(self) -> None:
        whole("routing_every", self.routing_every, 0)
        whole("routing_windows", self.routing_windows)


@dataclass(frozen=True, kw_only=True)
class LanguageRun(Run):
    """A run of a language model.

    `data` is the directory of the corpus, as `gape data prepare` writes it; "" while it is not said. The model's
    `context_length` is the task's length unless it is set.
    """

    kind: ClassVar[str] = "lm"

    data: str = ""
    task: TextTask = field(default_factory=TextTask)
    recall: RecallConfig = field(default_factory=RecallConfig)
    evaluation: LanguageEvaluation = field(default_factory=LanguageEvaluation)
    analysis: LanguageAnalysis = field(default_factory=LanguageAnalysis)

    @classmethod
    def defaults(cls, task: TextTask) -> dict[str, Settings]:
        """Gates divide distances by the training length."""
        return {"model": {"context_length": task.length}}
