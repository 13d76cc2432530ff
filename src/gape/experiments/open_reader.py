"""Models that read prompts, opened by name: a run of `gape lm train`, or a model of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gape.data import Tokenizer, load_tokenizer
from gape.experiments.open_model import MODEL, SETTINGS, load_transformers, open_run
from gape.models.gpt import GPT
from gape.tasks.ruler.readers import GPTReader, TransformersReader
from gape.train import checkpoint
from gape.utils.jsonl import read_object


def is_ours(spec: str) -> bool:
    """Whether a path holds a run or a checkpoint of ours."""
    path = Path(spec)
    return (path / "checkpoints").is_dir() or any((path / name).is_file() for name in (SETTINGS, checkpoint.STATE))


def run_tokenizer(directory: Path, spec: str | None) -> Tokenizer:
    """The tokenizer of a run: the one that was named, if the run records it; None does for a run on bytes.

    Raises:
        ValueError: none was named, or another; or it lacks its files.
    """
    config = read_object(directory / "config.json")
    recorded: dict[str, Any] = config.get("extra", {}).get("corpus", {}).get("tokenizer", {})
    if spec is None and recorded.get("kind") == "bytes":
        spec = "bytes"
    if spec is None:
        name = f", {recorded['name']}" if recorded.get("name") else ""
        raise ValueError(f"tokenizer: got nothing, expected the one that {directory} was trained with{name}")
    tokenizer = load_tokenizer(spec)
    digest = tokenizer.identity()["sha256"]
    if recorded and recorded.get("sha256") != digest:
        raise ValueError(
            f"tokenizer: got {spec!r}, expected the one that {directory} was trained with, {recorded.get('name')}"
        )
    return tokenizer


def run_reader(
    directory: Path, tokenizer: str | None = None, *, device: torch.device | str = "cpu", low: bool = False,
    chunk: int = 16384,
) -> tuple[GPTReader, int]:  # fmt: skip
    """The reader of a trained run or a checkpoint, and the step of its weights.

    Raises:
        ValueError: no run, no tokenizer, or another than the run's.
        CheckpointError: no valid checkpoint is there.
    """
    own = run_tokenizer(directory, tokenizer)
    opened = open_run(directory, device)
    opened.accept(own.identity())
    assert isinstance(opened.model, GPT)
    return GPTReader(opened.model, own, low=low, chunk=chunk), opened.identity["step"]


def transformers_reader(
    name: str, *, device: torch.device | str = "cpu", low: bool = False, chunk: int = 16384
) -> TransformersReader:
    """The reader of a causal model of `transformers` with its own tokenizer; code of the model's own is never run.

    `name` is a folder or a name on the hub; with `low` its weights are read as bfloat16, else as float32.

    Raises:
        ValueError: there is no such model, or its tokenizer lacks its files.
        ImportError: `transformers` is missing; says how to install it.
    """
    try:
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("models of transformers need it: pip install 'gape[hf]'") from error
    from gape.hf.reading import read  # noqa: PLC0415

    try:
        tokenizer = read(transformers.AutoTokenizer, name)
    except ValueError as error:
        raise ValueError(f"tokenizer: that of {name!r} cannot be loaded, are all its files there? {error}") from error
    if not tokenizer("The quick brown fox")["input_ids"]:
        raise ValueError(f"tokenizer: that of {name!r} makes no tokens of a text, expected its files to be whole")
    try:
        model = load_transformers(name, dtype=torch.bfloat16 if low else torch.float32)
    except ValueError as error:
        raise ValueError(f"model: got {name!r}, expected a run or a model of transformers: {error}") from error
    # Only the end of text: penalties for repetition and the like, which some models have, would not be greedy.
    model.generation_config = transformers.GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    path = Path(name)
    # gape hf finetune names the folder of every model "model".
    called = path.parent.name if path.name == MODEL and path.parent.name else path.name
    return TransformersReader(model.to(device).eval(), tokenizer, called, chunk=chunk)
