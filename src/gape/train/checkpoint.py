"""Checkpoints: safetensors and JSON, written under a temporary name, sealed, then renamed.

A checkpoint is a directory `step-00000100` with `model.safetensors`, `optimizer.safetensors`, `state.json` and the
seal, `manifest.json`: size and SHA-256 of the other three, written last. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as pack_tensors
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gape.distributed.job import Job
from gape.models import GPT, GPTConfig
from gape.train.optimizer import bare
from gape.utils import files
from gape.utils.files import DiskFullError

MODEL, OPTIMIZER, STATE, SEAL = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
SEALED = (MODEL, OPTIMIZER, STATE)
SUMMARY = "summary.json"
FORMAT = 1
#: Keys of every state.
STORED = (
    "step", "tokens", "loss", "validated", "validation", "perfect", "worse", "best", "device", "window", "log_bytes",
    "aliases", "train", "model", "data", "random",
)  # fmt: skip
_LOGGER = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{8,})")
# Errors of reading bytes that may be anything.
_BAD = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError)


class CheckpointError(RuntimeError):
    """A checkpoint that is broken, not sealed, or not of this model; `problems` says what is wrong, one line each."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__("; ".join([message, *problems]) if problems else message)
        self.problems = list(problems)


class Checkpoint(NamedTuple):
    """What a checkpoint holds: the step, tensors by name, and the rest of the state."""

    path: Path
    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def name(step: int) -> str:
    """The directory name of a step."""
    return f"step-{step:08d}"


def available(root: Path) -> list[Path]:
    """The checkpoints in a directory by name alone, whole or broken, newest first."""
    if not root.is_dir():
        return []
    steps = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(steps, reverse=True)]


def pack(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, bytes]:
    """The three files in memory; CheckpointError for a tensor that is not finite, with which none is written."""
    return {MODEL: _pack(model), OPTIMIZER: _pack(optimizer), STATE: files.to_json(state)}


def save(root: Path, step: int, packed: Mapping[str, bytes]) -> Path:
    """Write a checkpoint, verify it and return its directory; only then may older ones be deleted (:func:`prune`).

    DiskFullError when there is no room, CheckpointError when the disk returns other bytes than were written.
    """
    target = root / name(step)
    temporary = root / f".tmp-{target.name}-{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    contents = {key: {"size": len(packed[key]), "sha256": files.sha256(packed[key])} for key in SEALED}
    seal = files.to_json({"format": FORMAT, "step": step, "files": contents})
    with files.room(f"checkpoint {target.name}", root, sum(map(len, packed.values()))):
        try:
            temporary.mkdir()
            for key in SEALED:
                files.write(temporary / key, packed[key])
            files.write(temporary / SEAL, seal)
            files.settle(temporary)
            if target.exists():
                set_aside(target)
            temporary.replace(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        files.settle(root)
    if problems := verify(target):
        raise CheckpointError(f"{target} was written and cannot be read back; older checkpoints are kept", problems)
    return target


def prune(root: Path, *, keep_last: int, keep_step: int | None = None) -> None:
    """Delete all checkpoints but the `keep_last` newest and that of `keep_step`, and what earlier deletions left."""
    for old in available(root)[keep_last:]:
        if keep_step is None or old.name != name(keep_step):
            files.discard(old)
    files.sweep(root)


def verify(checkpoint: str | os.PathLike[str]) -> list[str]:
    """What is wrong with a checkpoint directory, one line each: every file is read, hashed and parsed."""
    return _read(Path(checkpoint))[1]


def load(checkpoint: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, every byte checked against the seal first; CheckpointError with all that is wrong."""
    content, problems = _read(Path(checkpoint))
    if content is None:
        raise CheckpointError(f"{checkpoint} is not a whole checkpoint", problems)
    return content


def newest(root: Path, warn: Callable[[str], None] = lambda message: None) -> Checkpoint | None:
    """The newest valid checkpoint of a run's `checkpoints/`, None where there is none at all.

    `warn` is called with the reason for each broken one. CheckpointError where all are: a new start would lose the run.
    """
    complaints = []
    for path in available(root):
        content, problems = _read(path)
        if content is not None:
            return content
        complaints.append(f"{path.name}: {', '.join(problems)}")
        warn(f"passed over {complaints[-1]}")
    if complaints:
        raise CheckpointError(f"no checkpoint in {root} is whole; move them away to start anew", complaints)
    return None


def set_aside(path: Path) -> Path:
    """Move a checkpoint out of the way under the name `step-00000100.aside`; it is no longer used."""
    names = (path.with_name(f"{path.name}.aside{number or ''}") for number in itertools.count())
    return path.replace(next(name for name in names if not name.exists()))


def resolve(path: str | os.PathLike[str], warn: Callable[[str], None] = lambda message: None) -> Checkpoint:
    """The checkpoint at `path`; for a run its best one (`patience`), else its newest valid one; or CheckpointError."""
    place = Path(path)
    if _NAME.fullmatch(place.name) or ((place / SEAL).is_file() and (place / STATE).is_file()):
        return load(place)
    checkpoint = newest(place / "checkpoints", warn)
    if checkpoint is None:
        raise CheckpointError(f"{place} is neither a checkpoint nor a run with checkpoints")
    best = best_step(checkpoint.state, place / SUMMARY)
    if best is None or best == checkpoint.step:
        return checkpoint
    content, problems = _read(place / "checkpoints" / name(best))
    if content is None:
        warn(f"passed over the best, {name(best)}: {', '.join(problems)}")
    return content or checkpoint


def best_step(state: Mapping[str, Any], summary: Path) -> int | None:
    """The step of the lowest validation loss, whose checkpoint a run with `patience` keeps; None without one.

    The summary of a run that is over decides: the newest checkpoint may be older than the last validation.
    """
    if not state["train"].get("patience"):
        return None
    if summary.is_file():
        best = files.from_json(summary.read_bytes()).get("best")
        return int(best["step"]) if best else None
    return int(state["best"][0]) if state["best"] else None


def check_space(root: Path, one: int, keep_last: int) -> None:
    """Raise DiskFullError where the checkpoints of a run, of `one` bytes each, will not fit on the disk."""
    # An old one is deleted after a new one is written, so the room for one is always needed.
    needed = max(one, one * (keep_last + 1) - sum(files.occupied(path) for path in available(root)))
    if needed > files.free(root):
        raise DiskFullError(f"{keep_last} checkpoints and one in the making", root, needed, files.free(root))


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, aliases): the model's state without prefixes of wrappers; a tied tensor is in it once."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        # Shards of one tensor may be empty, and then have no place of their own.
        place: tuple[Any, ...] = (id(value),)
        if not isinstance(value, DTensor):
            place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in names:
            aliases[bare(key)] = names[place]
        else:
            names[place] = bare(key)
            tensors[bare(key)] = value.detach()
    return tensors, aliases


def load_model_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], job: Job | None = None
) -> None:
    """Load what :func:`model_tensors` gave, in place, also into a wrapped or sharded model.

    In a job only its first process has the tensors. CheckpointError names those that do not fit.
    """
    job = job or Job()
    complete = {**tensors, **{alias: tensors[of] for alias, of in aliases.items() if of in tensors}}
    own = model.state_dict()
    job.from_first(lambda: _refuse_other(own, complete))
    with torch.no_grad():
        for key, value in own.items():
            job.put(value, complete.get(bare(key)))


def load_model(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu", warn: Callable[[str], None] = _LOGGER.warning
) -> GPT:
    """The model of a checkpoint, in eval mode, in the dtypes it was trained in; the seal is verified first.

    Args:
        path: a checkpoint, or a run directory: its best checkpoint (`patience`), else its newest valid one.
        device: of the model.
        warn: called with the reason when a broken checkpoint is passed over; logs a warning by default.

    Raises:
        CheckpointError: when nothing valid is there, or it is of another model.
    """
    return model_of(resolve(path, warn), device=device)


def model_of(chosen: Checkpoint, *, device: str | torch.device = "cpu") -> GPT:
    """The model of a checkpoint that was read already, as :func:`load_model`."""
    stored = chosen.state["model"]
    if stored["class"] != "GPT":
        raise CheckpointError(f"{chosen.path} holds a {stored['class']}, expected a GPT")
    try:
        model = GPT(GPTConfig.from_dict(stored["config"]))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{chosen.path / STATE} describes no model: {error}") from error
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (saved := chosen.model.get(chosen.state["aliases"].get(bare(name), bare(name)))) is not None:
            tensor.data = tensor.data.to(saved.dtype)
    load_model_tensors(model, chosen.model, chosen.state["aliases"])
    return model.to(device).eval()


def _refuse_other(own: Mapping[str, Tensor], complete: Mapping[str, Tensor]) -> None:
    names = {bare(key) for key in own}
    problems = [f"{name} is missing" for name in sorted(names - complete.keys())]
    problems += [f"{name} is unknown to the model" for name in complete if name not in names]
    for key, value in own.items():
        stored = complete.get(name := bare(key), value)
        if stored.shape != value.shape:
            problems.append(f"{name} has shape {tuple(stored.shape)}, the model's has {tuple(value.shape)}")
        if stored.dtype != value.dtype:
            problems.append(f"{name} is {stored.dtype}, the model's is {value.dtype}")
    if problems:
        raise CheckpointError("the checkpoint is of another model", problems)


def _pack(tensors: Mapping[str, Tensor]) -> bytes:
    on_cpu = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    for key, value in on_cpu.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(f"{key} is not finite; nothing was saved, earlier checkpoints stay")
    return pack_tensors(on_cpu, {"format": "pt"})


def _read(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """The content and no problems, or None and what is wrong."""
    try:
        raw = (path / SEAL).read_bytes()
        seal = files.from_json(raw)
        # Written again it must be the same bytes: there is no hash of the seal itself.
        if files.to_json(seal) != raw or seal.get("format") != FORMAT:
            raise ValueError("changed, or of another format")
        step, contents = int(seal["step"]), {key: dict(seal["files"][key]) for key in SEALED}
    except FileNotFoundError:
        return None, [f"{SEAL} is missing: the checkpoint was never sealed"]
    except _BAD as error:
        return None, [f"{SEAL} cannot be read ({error})"]
    problems: list[str] = []
    parsed: dict[str, Any] = {}
    for key, expected in contents.items():
        try:
            parsed[key] = _parse(path / key, expected)
        except (*_BAD, SafetensorError) as error:
            problems.append(f"{key} {_reason(error)}")
    if problems := problems or _inconsistencies(path, step, parsed[STATE]):
        return None, problems
    return Checkpoint(path, step, parsed[MODEL], parsed[OPTIMIZER], parsed[STATE]), []


def _parse(path: Path, expected: Mapping[str, Any]) -> Any:
    data = path.read_bytes()
    if len(data) != expected.get("size"):
        raise ValueError(f"has {len(data)} bytes, the seal says {expected.get('size')}")
    if files.sha256(data) != expected.get("sha256"):
        raise ValueError("does not match its SHA-256")
    return files.from_json(data) if path.suffix == ".json" else parse_tensors(data)


def _inconsistencies(path: Path, step: int, state: Mapping[str, Any]) -> list[str]:
    """What in the name and the state cannot be: another step, or a key that every run writes."""
    if state.get("step") != step:
        return [f"{STATE} is of step {state.get('step')}, the seal of step {step}"]
    if _NAME.fullmatch(path.name) and path.name != name(step):
        return [f"{SEAL} is of step {step}: the directory was {name(step)} and has another name"]
    return [f"{STATE} has no {key}" for key in STORED if key not in state]


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    text = str(error)
    return text if text.startswith(("has ", "does ")) else f"cannot be read ({text})"
