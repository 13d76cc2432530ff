"""Trained runs as analyses meet them: the model, what names it in rows, and the files that keep what was found.

A file of findings, such as `entropy.json`, holds what names the run and a list of sets. A set says in `asked` what was
looked at and how; the same question is not asked twice of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gape.models.gpt import GPT
from gape.train import checkpoint
from gape.train.load import model_of
from gape.utils import files
from gape.utils.jsonl import read_object
from gape.utils.stored_rows import fault
from gape.utils.validation import invalid_argument

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained run.

    Attributes:
        directory: where it lies.
        identity: run, variant, position, seed, train_length and step, as every row carries them.
        model: its newest weights, in eval mode.
        tokenizer: what identifies the tokenizer it was trained with; empty where that was not recorded.
    """

    directory: Path
    identity: Record
    model: GPT
    tokenizer: Mapping[str, Any]

    def accept(self, tokenizer: Mapping[str, Any]) -> None:
        """Refuse tokens that another tokenizer made.

        Raises:
            ValueError: another tokenizer, or ids that the model has no embedding for.
        """
        ours, theirs = self.tokenizer.get("sha256"), tokenizer.get("sha256")
        if ours is not None and theirs is not None and ours != theirs:
            raise invalid_argument(
                "tokenizer",
                tokenizer.get("name"),
                f"{self.tokenizer.get('name')}, with which {self.directory} was trained",
            )
        if tokenizer["vocab_size"] > self.model.config.vocab_size:
            raise invalid_argument(
                "tokenizer",
                tokenizer.get("name"),
                f"at most the {self.model.config.vocab_size} tokens of {self.directory}, not {tokenizer['vocab_size']}",
            )


def open_run(directory: Path, device: str | torch.device = "cpu", say: Callable[[str], None] = print) -> Trained:
    """Load a run.

    Raises:
        ValueError: there is no such directory, or its files are broken.
        CheckpointError: it holds no valid checkpoint.
    """
    if not directory.is_dir():
        raise ValueError(f"run: got {str(directory)!r}, expected a directory that gape lm train made")
    chosen = checkpoint.resolve(directory, say)
    model: GPT = model_of(chosen, device=device)
    settings, recorded = read_object(directory / "run.json"), read_object(directory / "config.json")
    task = settings.get("task")
    identity = {
        "run": settings.get("name", directory.resolve().name), "variant": settings.get("variant", ""),
        "position": model.config.position, "seed": settings.get("seed", 0),
        "train_length": (task if isinstance(task, dict) else {}).get("length", model.config.context_length),
        "step": chosen.step,
    }  # fmt: skip
    if wrong := fault(identity):
        raise ValueError(f"{directory / 'run.json'}: {wrong}")
    tokenizer = _tokenizer(settings) or _tokenizer(recorded)
    return Trained(directory=directory, identity=identity, model=model, tokenizer=tokenizer)


def kept(run: Trained, kind: str, asked: Record) -> bool:
    """Whether a file of findings has an answer to this already, for these weights."""
    found = read_object(run.directory / f"{kind}.json")
    return _same(found, run.identity) and any(known["asked"] == asked for known in found["sets"])


def keep(run: Trained, kind: str, asked: Record, found: Record) -> Path:
    """Add a set to a file of findings; those of other weights go."""
    path = run.directory / f"{kind}.json"
    before = read_object(path)
    sets = [known for known in before["sets"] if known["asked"] != asked] if _same(before, run.identity) else []
    record = run.identity | {"sets": [*sets, {"asked": asked, **found}]}
    files.replace(path, files.to_json(record, indent=None))
    return path


def _same(found: Record, identity: Record) -> bool:
    return bool(found) and all(found.get(key) == value for key, value in identity.items())


def _tokenizer(settings: Any) -> Mapping[str, Any]:
    """The tokenizer that settings speak of, at whatever depth."""
    if not isinstance(settings, Mapping):
        return {}
    known = settings.get("tokenizer")
    if isinstance(known, Mapping) and "sha256" in known:
        return known
    return next((found for value in settings.values() if (found := _tokenizer(value))), {})
