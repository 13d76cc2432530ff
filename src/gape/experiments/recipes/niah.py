"""What a recipe of the needle task says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gape.experiments.recipes.run import Run, buildable
from gape.experiments.recipes.tables import Settings
from gape.models.config import GPTConfig
from gape.tasks.niah import VOCAB_SIZE, NIAHConfig
from gape.train.config import TrainConfig
from gape.utils.validation import invalid_argument, whole


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
            raise invalid_argument("factors", self.factors, "multiples with 1 among them, where gates are read")


@dataclass(frozen=True, kw_only=True)
class NeedleRun(Run):
    """A run on the needle task.

    Attributes:
        task, model, train, evaluation, analysis: the sections.
    """

    kind: ClassVar[str] = "niah"
    sections: ClassVar[Mapping[str, type[Any]]] = {
        "task": NIAHConfig,
        "model": GPTConfig,
        "train": TrainConfig,
        "evaluation": Evaluation,
        "analysis": Analysis,
    }

    task: NIAHConfig
    evaluation: Evaluation
    analysis: Analysis

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.switched is not None:
            buildable(self.switched)

    @classmethod
    def taken(cls, task: NIAHConfig, seed: int) -> dict[str, Settings]:
        """The vocabulary and the training length are the task's, the seed is the run's."""
        return {**super().taken(task, seed), "model": {"vocab_size": VOCAB_SIZE, "context_length": task.length}}

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
