"""The settings of a training run, checked, with every default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gape.utils.validation import finite, flag, invalid_argument, positive_number, weight, whole

# What may differ between a checkpoint and the run that resumes it: nothing here changes a weight, but for the rounding
# of sums over processes. `decay_steps` is not among them, so that more steps never bend the schedule of earlier ones.
MAY_CHANGE = frozenset(
    {"max_steps", "log_every", "check_every", "checkpoint_every", "keep_last", "progress", "shard", "context_parallel"}
)
_AT_LEAST = {
    "max_steps": 1,
    "warmup_steps": 0,
    "accumulation": 1,
    "context_parallel": 1,
    "seed": 0,
    "validate_every": 0,
    "stop_after_perfect": 0,
    "patience": 0,
    "checkpoint_every": 0,
    "keep_last": 1,
    "log_every": 1,
}
_NOT_NEGATIVE = ("min_learning_rate", "weight_decay", "gate_lr_multiplier", "clip", "lambda_l1")
_CHOICES = {
    "precision": ("auto", "float32", "bfloat16"),
    "compile": ("auto", "on", "off", "graphs"),
    "progress": ("auto", "bar", "plain", "off"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a :class:`gape.train.Trainer`. Defaults are the paper's where it gives one.

    Attributes:
        max_steps: updates in all.
        learning_rate, min_learning_rate: where the cosine begins and ends.
        warmup_steps: updates in which the rate rises linearly.
        decay_steps: the update at which the cosine ends; `max_steps` when None. Give it to be able to add steps later.
        betas, eps, weight_decay: of AdamW; the decay is for tensors of two dimensions or more that are not gates.
        gate_lr_multiplier: times the rate, for gates and amplitudes.
        clip: largest norm of the gradient; 0 leaves it.
        accumulation: micro-batches per update.
        lambda_l1: weight of the mean landmark in the loss.
        skip_eps: attention that a query may lose, in each layer and head, to tiles of keys that are skipped in training
            and validation; 0 skips nothing. It needs gates and a GPU (:func:`gape.models.skipping.skip`).
        shard: under `torchrun`, shard parameters, gradients and moments over the processes (FSDP2); without, every
            process has all of them (DDP).
        context_parallel: processes that share the tokens of a sequence; it divides their number.
        seed: of the random states at the start (dropout); the source has a seed of its own.
        precision: "bfloat16" autocasts, "float32" does not; "auto" is bfloat16 on a GPU only.
        compile: "on", "off"; "auto" compiles on a GPU only, and so does "graphs", which also replays whole updates as
            one CUDA graph: for models so small that launching their kernels takes longer than running them. Several
            processes compile and replay nothing.
        deterministic: ask torch for deterministic algorithms while training.
        validate_every: updates between validations; 0 never validates.
        stop_after_perfect: end after so many validations in a row with accuracy 1; 0 never ends early.
        patience: end after so many validations in a row whose "loss" is not below the best; the checkpoint of the best
            is kept and is the run's model. 0 never ends for it and keeps the newest checkpoints only.
        checkpoint_every: updates between checkpoints; 0 saves only at the end and when stopped.
        keep_last: checkpoints kept.
        log_every: updates between log lines.
        check_every: updates between looks at the loss and gradient for non-finite values (the weights are safe in
            between); None is 1 on a CPU and `log_every` on a GPU.
        progress: "bar", "plain" lines, "off"; "auto" is a bar on a terminal and lines elsewhere.

    Raises:
        ValueError: for a value outside its range; names the key.
    """

    max_steps: int
    learning_rate: float = 3e-4
    min_learning_rate: float = 3e-5
    warmup_steps: int = 0
    decay_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    gate_lr_multiplier: float = 1.0
    clip: float = 1.0
    accumulation: int = 1
    lambda_l1: float = 0.0
    skip_eps: float = 0.0
    shard: bool = False
    context_parallel: int = 1
    seed: int = 0
    precision: str = "auto"
    compile: str = "auto"
    deterministic: bool = False
    validate_every: int = 100
    stop_after_perfect: int = 3
    patience: int = 0
    checkpoint_every: int = 500
    keep_last: int = 2
    log_every: int = 10
    check_every: int | None = None
    progress: str = "auto"

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            whole(name, getattr(self, name), least)
        for name in ("decay_steps", "check_every"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        for name in ("learning_rate", "eps"):
            positive_number(name, getattr(self, name))
        weight("skip_eps", self.skip_eps)
        for name in _NOT_NEGATIVE:
            if finite(name, getattr(self, name)) < 0:
                raise invalid_argument(name, getattr(self, name), "a finite number of at least 0")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise invalid_argument(name, getattr(self, name), f"one of {', '.join(choices)}")
        flag("deterministic", self.deterministic)
        flag("shard", self.shard)
        betas = self.betas
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise invalid_argument("betas", betas, "two numbers from 0 to below 1")
        for beta in betas:
            weight("betas", beta)
        if self.seed >= 2**64:
            raise invalid_argument("seed", self.seed, "a whole number below 2**64, as torch takes it")
        if self.min_learning_rate > self.learning_rate:
            expected = f"at most learning_rate = {self.learning_rate}"
            raise invalid_argument("min_learning_rate", self.min_learning_rate, expected)
        # Lists come from JSON and TOML; a frozen dataclass is set through object.
        object.__setattr__(self, "betas", (float(betas[0]), float(betas[1])))
        object.__setattr__(self, "decay_steps", self.max_steps if self.decay_steps is None else self.decay_steps)

    @property
    def layer_eps(self) -> float:
        """The part of `skip_eps` that kernels may skip: half of it where processes also skip keys."""
        return self.skip_eps / 2 if self.context_parallel > 1 else self.skip_eps

    def parallel(self) -> dict[str, Any]:
        """The options of :class:`gape.distributed.Ranks`."""
        return {"shard": self.shard, "context_parallel": self.context_parallel, "skip_eps": self.skip_eps / 2}

    def low(self, device_type: str) -> bool:
        """Whether forward passes run under bfloat16 autocast on a kind of device."""
        return self.precision == "bfloat16" or (self.precision == "auto" and device_type == "cuda")

    def compiles(self, device_type: str) -> bool:
        """Whether forward passes are compiled on a kind of device."""
        return self.compile == "on" or (self.compile != "off" and device_type == "cuda")

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, in the types JSON has."""
        return {**dataclasses.asdict(self), "betas": list(self.betas)}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs between stored settings and those of now and may not, a line per key."""
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if key not in MAY_CHANGE and before.get(key) != now.get(key):
            hint = f" (to add steps, give {key}={before.get(key)} with the new max_steps)"
            line = f"{prefix}{key} was {before.get(key)!r} and is now {now.get(key)!r}"
            lines.append(line + hint if key == "decay_steps" else line)
    return lines
