"""What a recipe of a language model says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gape.experiments.recipes.run import Run
from gape.experiments.recipes.tables import Settings
from gape.models.config import GPTConfig
from gape.tasks.perplexity import Protocol
from gape.train.config import TrainConfig
from gape.utils.validation import whole


@dataclass(frozen=True, kw_only=True)
class Text:
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
class Evaluation:
    """How a model is measured on held-out documents.

    Attributes:
        validation_windows: windows of the training length per validation, the same ones every time.
        contexts: lengths at which perplexity is measured after training; none when empty.
        protocol, last, stride, align: as in :class:`gape.tasks.perplexity.Protocol`.
        max_windows: windows per context at most.
        seed: which windows; the same for every run, so that runs can be compared window by window.
        chunk: tokens that go through the model at once; longer windows are read with a cache.
    """

    validation_windows: int = 256
    contexts: tuple[int, ...] = ()
    protocol: str = "last-k"
    last: int = 512
    stride: int = 512
    align: int = 0
    max_windows: int = 8000
    seed: int = 0
    chunk: int = 16384

    def __post_init__(self) -> None:
        for name in ("validation_windows", "max_windows", "chunk"):
            whole(name, getattr(self, name))
        whole("seed", self.seed, 0)
        for context in self.contexts:
            self.at(context)

    def at(self, context: int) -> Protocol:
        """The protocol at one context.

        Raises:
            ValueError: a value that it refuses.
        """
        return Protocol(name=self.protocol, context=context, last=self.last, stride=self.stride, align=self.align)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What is looked at inside the model while it learns.

    Attributes:
        routing_every: updates between looks at the gates, from 0 on; 0 never looks.
        routing_windows: held-out windows of the training length that are looked at, the same ones every time.
    """

    routing_every: int = 0
    routing_windows: int = 8

    def __post_init__(self) -> None:
        whole("routing_every", self.routing_every, 0)
        whole("routing_windows", self.routing_windows)


@dataclass(frozen=True, kw_only=True)
class LanguageRun(Run):
    """A run of a language model.

    Attributes:
        data: directory of the corpus, as `gape data prepare` writes it; "" while it is not said.
        task, model, train, evaluation, analysis: the sections. The model's `context_length` is the task's length
            unless it is set.
    """

    kind: ClassVar[str] = "lm"
    top: ClassVar[Mapping[str, type[Any]]] = {**Run.top, "data": str}
    sections: ClassVar[Mapping[str, type[Any]]] = {
        "task": Text,
        "model": GPTConfig,
        "train": TrainConfig,
        "evaluation": Evaluation,
        "analysis": Analysis,
    }

    data: str = ""
    task: Text = field(default_factory=Text)
    evaluation: Evaluation = field(default_factory=Evaluation)
    analysis: Analysis = field(default_factory=Analysis)

    @classmethod
    def defaults(cls, task: Text) -> dict[str, Settings]:
        """Gates divide distances by the training length."""
        return {"model": {"context_length": task.length}}
