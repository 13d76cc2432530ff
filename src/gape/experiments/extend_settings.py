"""Settings of `gape hf extend`, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gape.data import RecallConfig
from gape.data.recall import fraction
from gape.data.recall_texts import MOST_FACTS
from gape.experiments.open_model import base_of
from gape.experiments.own_answers import MEASURED_PROMPTS
from gape.hf.extension import METHODS
from gape.train import TrainConfig
from gape.utils import files
from gape.utils.validation import invalid_argument, positive_number, whole

#: Tokens of the longest default window and of an update.
WINDOW, UPDATE = 4096, 65536
#: Facts of a recall text at most: of `WINDOW` tokens, and of the second phase, whose texts have a sixteenth at least.
FACTS, LONG_FACTS = 32, MOST_FACTS
#: Folders of the two phases of the tuning.
SHORT, LONG = "tuning", "tuning-long"
#: Tokens of the windows of the second phase.
LONG_WINDOW = 65536
#: Tokens of a pass at least, where an update has as many: many small passes would wait for the host.
PASS_TOKENS = 16384
#: Attention that a query may lose to tiles which kernels skip in windows longer than `WINDOW`.
SKIP_EPS = 1e-4
#: Texts that heads are scored on, a third of them at each distance.
SCORED_TEXTS = 15
#: Of :func:`gape.hf.plan_floors`, those that are not chosen here.
PLAN_OPTIONS = ("bounds", "mass", "position", "free_position", "least", "amplitude", "context_length")


class Phase(NamedTuple):
    """A part of the tuning with windows of one length: a folder, updates, tokens and windows at once, the rate."""

    folder: str
    steps: int
    length: int
    batch_size: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is done; see the options of `gape hf extend`. None means: chosen from the model.

    Without `before` only the result is measured, not the model that it came from.
    """

    model: str
    data: tuple[str, ...]
    to: int
    method: str = "ours"
    steps: int = 300
    length: int | None = None
    long_steps: int = 220
    long_length: int | None = None
    update_tokens: int = UPDATE
    batch_size: int | None = None
    learning_rate: float = 3e-4
    gate_rate: float = 10.0
    warmup: int = 20
    free: int | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    sinks: bool = True
    log_scale: bool = False
    floors: str | None = None
    factor: float | None = None
    recall: float = 0.7
    recall_weight: float = 16.0
    skip_to: int = 0
    keep: float = 0.1
    lora: int = 0
    heldout_fraction: float = 0.05
    lengths: tuple[int, ...] | None = None
    needles: str | None = None
    samples: int = 16
    windows: int = 16
    new_tokens: int = 64
    prompts: int = MEASURED_PROMPTS
    before: bool = True
    gradient_checkpointing: bool = False
    checkpoint_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise invalid_argument("method", self.method, f"one of {', '.join(METHODS)}")
        for name in ("to", "steps", "update_tokens", "windows", "new_tokens"):
            whole(name, getattr(self, name))
        for name in ("samples", "prompts", "lora", "seed", "long_steps"):
            whole(name, getattr(self, name), 0)
        for name, least in (("length", 2), ("long_length", 2), ("batch_size", 1)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least)
        for length in self.lengths or ():
            whole("lengths", length, 2)
        if self.factor is not None:
            positive_number("factor", self.factor)
        self._refuse_unused()
        if (self.method == "floors") != (self.floors is not None):
            raise invalid_argument("floors", self.floors, "a file of floors with the method floors, and only there")
        if self.prompts > MEASURED_PROMPTS:
            raise invalid_argument("prompts", self.prompts, f"at most {MEASURED_PROMPTS}")
        self.recall_config()
        if fraction("keep", self.keep) + self.recall > 1:
            raise invalid_argument("keep", self.keep, f"at most {1 - self.recall:g}, what recall texts leave")

    def _refuse_unused(self) -> None:
        """Refuse options that the method does not read, and unknown ones of the plan."""
        for name, method in (("factor", "yarn"), ("free", "ours"), ("plan", "ours"), ("log_scale", "ours")):
            value = getattr(self, name)
            if self.method != method and not (value is None or value is False or value == {}):
                raise invalid_argument(name, value, f"nothing with the method {self.method}; {method} takes it")
        if self.method != "ours" and not self.sinks:
            raise invalid_argument("sinks", False, f"nothing with the method {self.method}; ours takes it")
        for name in self.plan:
            if name not in PLAN_OPTIONS:
                raise ValueError(f"plan: got the key {name!r}, expected one of {', '.join(PLAN_OPTIONS)}")

    def recall_config(self, *, long: bool = False) -> RecallConfig:
        """The recall texts of the first or the second phase: a long window has many facts, as it costs as much with
        few.
        """
        facts, least, skip_to = (LONG_FACTS, LONG_FACTS // 16, 0) if long else (FACTS, 1, self.skip_to)
        return RecallConfig(share=self.recall, weight=self.recall_weight, facts=facts, least=least, skip_to=skip_to)

    def window(self, native: int) -> int:
        """Tokens of a training window."""
        return self.length or min(WINDOW, native)

    def phases(self, native: int) -> tuple[Phase, ...]:
        """The tuning: windows within the native context first, then longer ones where some are wanted."""
        length, long_length = self.window(native), self.long_length or min(LONG_WINDOW, self.to)
        if self.long_steps and long_length < length:
            raise invalid_argument("long_length", long_length, f"at least the {length} tokens of a window")
        if 0 < self.skip_to <= length:
            raise invalid_argument("skip_to", self.skip_to, f"0, or more than the {length} tokens of a window")
        # Both phases take as many tokens at once.
        at_once = min(self.update_tokens, max(PASS_TOKENS, long_length if self.long_steps else 0))
        short_batch = self.batch_size or max(1, at_once // length)
        short = Phase(SHORT, self.steps, length, short_batch, self.learning_rate)
        # A rate between those that the first phase begins and ends with.
        long_batch = max(1, short_batch * length // long_length)
        long = Phase(LONG, self.long_steps, long_length, long_batch, self.learning_rate / 3)
        return (short, long) if self.long_steps else (short,)

    def train_config(
        self, phase: Phase, precision: str, *, skips: bool = False, context_parallel: int = 1
    ) -> TrainConfig:
        """The settings of a phase of the tuning; `skips` where kernels may skip what gates prove negligible."""
        accumulation = max(1, round(self.update_tokens / (phase.batch_size * phase.length)))
        return TrainConfig(
            max_steps=phase.steps, learning_rate=phase.learning_rate, min_learning_rate=phase.learning_rate / 10,
            warmup_steps=min(self.warmup, phase.steps), weight_decay=0.0, gate_lr_multiplier=self.gate_rate,
            accumulation=accumulation, seed=self.seed, precision=precision, compile="off", stop_after_perfect=0,
            validate_every=self.checkpoint_every, checkpoint_every=self.checkpoint_every, keep_last=1,
            context_parallel=context_parallel, log_every=min(10, phase.steps),
            skip_eps=SKIP_EPS if skips and phase.length > WINDOW else 0.0,
        )  # fmt: skip

    def stored(self) -> dict[str, Any]:
        """What `extend.json` says; names of places are not what a result depends on."""
        values = dataclasses.asdict(self) | {"model": base_of(self.model), "data": [Path(d).name for d in self.data]}
        values["needles"] = None if self.needles is None else Path(self.needles).name
        values["floors"] = None if self.floors is None else Path(self.floors).name
        return dict(files.plain(values))
