"""The tokenizer that a run was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gape.data import Tokenizer, load_tokenizer
from gape.utils.jsonl import read_object


def run_tokenizer(directory: Path, spec: str | None) -> Tokenizer:
    """The tokenizer of a run: the one that was named, where it is the one that the run records.

    Args:
        directory: the run's.
        spec: as :func:`gape.data.load_tokenizer` takes it; None does for a run on bytes.

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
