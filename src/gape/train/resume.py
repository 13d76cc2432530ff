"""Resuming a run: what is stored, what is compared, what is restored; random states and determinism."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gape.data.windows import Source
from gape.distributed.job import Job
from gape.train import checkpoint
from gape.train.checkpoint import Checkpoint, CheckpointError
from gape.train.config import TrainConfig, changes
from gape.train.optimizer import load_state_tensors, named, state_tensors
from gape.utils import files
from gape.utils.validation import invalid_argument

_RANDOM = "random/"


@dataclasses.dataclass
class RunState:
    """The progress of a run, stored in its checkpoints.

    `loss` is that of the last log line, `validated` and `validation` step and numbers of the last validation, `perfect`
    the validations with accuracy 1 in a row, `best` step and loss of the best, `worse` the validations since then.
    """

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    validated: int = 0
    validation: dict[str, float] | None = None
    perfect: int = 0
    best: tuple[int, float] | None = None
    worse: int = 0


def identity(model: nn.Module, config: TrainConfig, source: Source, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What config.json says of a run. A checkpoint is resumed only with the same "train", "model" and "data"."""
    fingerprint = getattr(source, "fingerprint", None)
    described = getattr(getattr(model, "config", None), "to_dict", None)
    about = {
        "train": config.to_dict(),
        "model": {"class": type(model).__name__, "config": described() if described else {}},
        "data": fingerprint() if fingerprint else None,
        "extra": extra or {},
    }
    return {key: files.plain(value) for key, value in about.items()}


def choose(root: Path, resume: str | PathLike[str], warn: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint to resume from, None to start anew; a ValueError for another run's, CheckpointError if broken."""
    if resume == "auto":
        return checkpoint.newest(root, warn)
    if resume == "never":
        if existing := checkpoint.available(root):
            raise invalid_argument("resume", resume, f"'auto' or another directory, since {existing[0]} exists")
        return None
    path = Path(resume)
    if path.resolve().parent != root.resolve():
        raise invalid_argument("resume", str(resume), f"'auto', 'never' or a checkpoint in {root}")
    return checkpoint.load(path)


def shared(job: Job, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """The checkpoint that the first process of a job finds, for all: the others get no tensors, only the rest."""
    chosen: list[Checkpoint | None] = [None]

    def describe() -> dict[str, Any] | None:
        chosen[0] = own = find()
        return None if own is None else {"path": str(own.path), "step": own.step, "state": own.state}

    described = job.from_first(describe)
    if described is None or chosen[0] is not None:
        return chosen[0]
    return Checkpoint(Path(described["path"]), described["step"], {}, {}, described["state"])


def refuse_changes(chosen: Checkpoint, now: Mapping[str, Any]) -> None:
    """Raise a ValueError with every key that changed since the checkpoint and may not."""
    before = chosen.state
    was, new = ({"class": x["model"]["class"], **x["model"]["config"]} for x in (before, now))
    lines = changes(before["train"], now["train"]) + changes(was, new, "model.")
    lines += changes({"data": before["data"]}, {"data": now["data"]})
    if now["train"]["max_steps"] < chosen.step:
        lines.append(f"max_steps is {now['train']['max_steps']} and the run is at step {chosen.step} already")
    if lines:
        raise ValueError(f"resume: {chosen.path.name} is of another run: {'; '.join(lines)}")


def facts(model: nn.Module, config: TrainConfig, device: torch.device, job: Job) -> dict[str, Any]:
    """What the manifest says of a run, "auto" resolved."""
    return {
        "precision": "bfloat16" if config.low(device.type) else "float32",
        "compiled": config.compiles(device.type),
        "processes": job.size,
        "deterministic": config.deterministic,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """About how many bytes a checkpoint has."""
    weights = sum(t.nbytes for t in checkpoint.model_tensors(model)[0].values())
    moments = sum(2 * p.nbytes for p in named(optimizer).values())
    return weights + moments + 2**16


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    about: dict[str, Any],
    state: RunState,
    job: Job,
    *,
    window: Sequence[Sequence[float]],
    log_bytes: int,
) -> dict[str, bytes]:
    """The files of a checkpoint of the current state; empty in all processes of a job but the first."""
    tensors, numbers = random_states(device)
    weights, aliases = checkpoint.model_tensors(model)
    weights, moments = job.full(weights), job.full(state_tensors(optimizer))
    if not job.is_first:
        return {}
    moments |= {f"{_RANDOM}{key}": value for key, value in tensors.items()}
    rest = {"device": device.type, "window": window, "log_bytes": log_bytes, "aliases": aliases, "random": numbers}
    return checkpoint.pack(weights, moments, dataclasses.asdict(state) | rest | about)


def restore(
    chosen: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, job: Job
) -> tuple[RunState, list[list[float]]]:
    """Load weights, moments and random states, or raise CheckpointError; the progress and the open log window."""
    checkpoint.load_model_tensors(model, chosen.model, chosen.state["aliases"], job)
    moments = {key: value for key, value in chosen.optimizer.items() if not key.startswith(_RANDOM)}
    states = {key.removeprefix(_RANDOM): v for key, v in chosen.optimizer.items() if key.startswith(_RANDOM)}
    try:
        load_state_tensors(optimizer, moments, job)
    except ValueError as error:
        raise CheckpointError(f"{chosen.path.name} does not fit: {error}") from error
    try:
        # Several processes draw by seed, step and rank.
        if job.size == 1:
            restore_random_states(states, chosen.state["random"], device)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{chosen.path}: the random states in it are invalid: {error}") from error
    state = RunState(**{field.name: chosen.state[field.name] for field in dataclasses.fields(RunState)})
    # JSON has lists.
    state.best = (int(state.best[0]), float(state.best[1])) if state.best else None
    return state, chosen.state["window"]


def refuse_foreign(run_dir: Path) -> None:
    """Refuse a directory with files that are named as a run's, and no runtime.jsonl, with which every run begins."""
    existing = [path for name in ("config.json", "log.jsonl", "manifest.json") if (path := run_dir / name).exists()]
    begun = (run_dir / "runtime.jsonl").exists() or (run_dir / "checkpoints").is_dir()
    if not begun and any(path.stat().st_size for path in existing):
        expected = f"a new directory or one of a run: {existing[0].name} is of none"
        raise invalid_argument("run_dir", str(run_dir), expected)


def seed_all(seed: int) -> None:
    """Seed torch (every device), Python's random and NumPy's global state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def random_states(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, numbers): torch's states (uint8 tensors, the CPU's and `device`'s), Python's and NumPy's (for JSON)."""
    tensors = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    numbers = {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }
    return tensors, numbers


def restore_random_states(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], device: torch.device) -> None:
    """Restore what :func:`random_states` gave; the state of a GPU only on a GPU."""
    torch.set_rng_state(tensors["torch"].cpu())
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"].cpu(), device)
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002


@contextlib.contextmanager
def preserved_random_states(device: torch.device) -> Iterator[None]:
    """A context that restores the random states when it ends."""
    tensors, numbers = random_states(device)
    try:
        yield
    finally:
        restore_random_states(tensors, numbers, device)


@contextlib.contextmanager
def determinism(enabled: bool, device: torch.device) -> Iterator[None]:
    """A context with torch's deterministic algorithms, where `enabled`; on a GPU with CUBLAS_WORKSPACE_CONFIG alone."""
    if not enabled:
        yield
        return
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise ValueError(
            "deterministic: got True, expected CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment beside it"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
