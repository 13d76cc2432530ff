"""Going on where a run stopped: what is stored, what is compared, what is put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gape.data.windows import Source
from gape.train import checkpoint, rng
from gape.train.checkpoint import Checkpoint
from gape.train.config import TrainConfig, changes
from gape.train.optimizer import load_state_tensors, state_tensors
from gape.utils import files
from gape.utils.errors import CheckpointError
from gape.utils.validation import invalid_argument

_RANDOM = "random/"


@dataclasses.dataclass
class RunState:
    """Where a run is: numbers that a checkpoint carries.

    step: updates done. tokens: tokens seen. loss: of the last log line. validated: step of the last validation.
    validation: its numbers. perfect: validations with accuracy 1 in a row. best: step and loss of the validation with
    the lowest loss. worse: validations since.
    """

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    validated: int = 0
    validation: dict[str, float] | None = None
    perfect: int = 0
    best: tuple[int, float] | None = None
    worse: int = 0


@dataclasses.dataclass(frozen=True)
class Identity:
    """What makes a run this run, in the types JSON has."""

    train: dict[str, Any]
    model: dict[str, Any]
    data: Any
    extra: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, config: TrainConfig, source: Source, extra: Mapping[str, Any] | None) -> Identity:
        """The identity of a trainer's parts."""
        fingerprint = getattr(source, "fingerprint", None)
        described = getattr(getattr(model, "config", None), "to_dict", None)
        return cls(
            train=files.plain(config.to_dict()),
            model={"class": type(model).__name__, "config": files.plain(described()) if described else {}},
            data=files.plain(fingerprint()) if fingerprint else None,
            extra=files.plain(extra or {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """For config.json and state.json."""
        return {"train": self.train, "model": self.model, "data": self.data, "extra": self.extra}


def choose(root: Path, resume: str | PathLike[str], say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint to go on from, None to start anew.

    Raises:
        ValueError: for "never" where there are checkpoints, and for a checkpoint of another run.
        CheckpointError: when the one asked for, or every one there is, is broken.
    """
    if resume == "auto":
        return checkpoint.newest(root, say)
    if resume == "never":
        if there := checkpoint.found(root):
            raise invalid_argument("resume", resume, f"'auto' or another directory, since {there[0]} is there already")
        return None
    path = Path(resume)
    if path.resolve().parent != root.resolve():
        raise invalid_argument("resume", str(resume), f"'auto', 'never' or a checkpoint in {root}")
    return checkpoint.load(path)


def refuse_changes(chosen: Checkpoint, now: Identity) -> None:
    """Compare what the checkpoint was made with.

    Raises:
        ValueError: names every key that may not change and did.
    """
    before = chosen.state
    lines = changes(before["train"], now.train)
    was, new = before["model"], now.model
    if was["class"] != new["class"]:
        lines.append(f"model was a {was['class']} and is now a {new['class']}")
    for key in sorted(was["config"].keys() | new["config"].keys()):
        if was["config"].get(key) != new["config"].get(key):
            lines.append(f"model.{key} was {was['config'].get(key)!r} and is now {new['config'].get(key)!r}")
    if before["data"] != now.data:
        lines.append(f"data was {before['data']!r} and is now {now.data!r}")
    if now.train["max_steps"] < chosen.step:
        lines.append(f"max_steps is {now.train['max_steps']} and the run is at step {chosen.step} already")
    if lines:
        raise ValueError(f"resume: {chosen.path.name} is of another run: {'; '.join(lines)}")


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    identity: Identity,
    state: RunState,
    *,
    window: Sequence[Sequence[float]],
    log_bytes: int,
) -> dict[str, bytes]:
    """The files of a checkpoint of this moment."""
    tensors, numbers = rng.capture(device)
    weights, aliases = checkpoint.model_tensors(model)
    moments = state_tensors(optimizer) | {f"{_RANDOM}{key}": value for key, value in tensors.items()}
    return checkpoint.pack(
        weights,
        moments,
        {
            **dataclasses.asdict(state),
            "device": device.type,
            "window": window,
            "log_bytes": log_bytes,
            "aliases": aliases,
            **identity.to_dict(),
            "random": numbers,
        },
    )


def restore(
    chosen: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[RunState, list[list[float]]]:
    """Put weights, moments and random states back; where the run was, and the rows of its open log window.

    Raises:
        CheckpointError: when the checkpoint does not fit the model.
    """
    checkpoint.load_model_tensors(model, chosen.model, chosen.state["aliases"])
    moments = {key: value for key, value in chosen.optimizer.items() if not key.startswith(_RANDOM)}
    states = {key.removeprefix(_RANDOM): v for key, v in chosen.optimizer.items() if key.startswith(_RANDOM)}
    try:
        load_state_tensors(optimizer, moments)
    except ValueError as error:
        raise CheckpointError(f"{chosen.path.name} does not fit: {error}") from error
    try:
        rng.restore(states, chosen.state["random"], device)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{chosen.path}: the random states in it are none: {error}") from error
    names = [field.name for field in dataclasses.fields(RunState)]
    state = RunState(**{name: chosen.state[name] for name in names if name in chosen.state})
    # JSON has lists.
    state.best = (int(state.best[0]), float(state.best[1])) if state.best else None
    return state, chosen.state["window"]
