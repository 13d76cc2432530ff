"""The Hugging Face hub, streamed: a dataset, hf:NAME[@REVISION][:CONFIG], or files of one, hf:NAME[@REVISION]#FILES."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

PREFIX = "hf:"
_FORM = re.compile(r"hf:(?P<dataset>[^@:#]+)(@(?P<revision>[^:#]+))?(:(?P<config>[^#]+)|#(?P<files>.+))?")


class Spec(NamedTuple):
    """The parts of a name: the dataset, a revision, and a configuration or a pattern of files in it."""

    dataset: str
    revision: str | None
    config: str | None
    files: str | None


class File(NamedTuple):
    """A file of a dataset's repository: its name with the dataset's, its size, the commit, and how to open it."""

    name: str
    size: int
    revision: str | None
    open: Callable[[], IO[bytes]]


def parse(spec: str) -> Spec:
    """The parts of a name.

    Raises:
        ValueError: it has not the form.
    """
    match = _FORM.fullmatch(spec)
    if match is None:
        raise ValueError(
            f"inputs: got {spec!r}, expected hf:DATASET[@REVISION][:CONFIG] or hf:DATASET[@REVISION]#FILES"
        )
    return Spec(match["dataset"], match["revision"], match["config"], match["files"])


def revision(spec: str) -> str | None:
    """The commit a dataset is read at, so that a resume reads the same; None for a folder on this machine.

    Raises:
        ValueError: the hub does not have it, or cannot be reached.
        ImportError: the libraries are missing.
    """
    dataset, asked, _, _ = parse(spec)
    if Path(dataset).exists():
        return None
    try:
        commit: str | None = _hub().HfApi().dataset_info(dataset, revision=asked).sha
    # Whatever the network or the hub says.
    except Exception as error:
        raise ValueError(f"inputs: got {spec!r}, which the hub does not give: {error}") from error
    return commit


def files(spec: str) -> list[File]:
    """The files of a dataset that match the pattern, by sorted path. They are read as files here are, line by line.

    Unlike the library's loader this does not mind files whose other fields differ, and a resume opens none of the
    files that are done with.

    Raises:
        ValueError: there is no such dataset, or no such file in it.
    """
    dataset, _, _, pattern = parse(spec)
    commit = revision(spec)
    system, root = filesystem(), f"datasets/{dataset}@{commit}/"
    found = system.glob(f"{root}{pattern}", detail=True)
    chosen = sorted((path, info["size"]) for path, info in found.items() if info["type"] == "file")
    if not chosen:
        raise ValueError(f"inputs: got {spec!r}, expected a pattern of files that the dataset has")

    def opener(path: str) -> Callable[[], IO[bytes]]:
        return lambda: system.open(path, "rb")

    return [File(f"{PREFIX}{dataset}#{path.removeprefix(root)}", size, commit, opener(path)) for path, size in chosen]


def stream(spec: str, commit: str | None, skip: int) -> Iterator[dict[str, Any]]:
    """The examples of the split "train" after the first `skip`, in the dataset's order.

    Raises:
        ValueError: the dataset cannot be loaded, for instance for want of a configuration, or breaks off.
    """
    dataset, _, config, _ = parse(spec)
    try:
        loaded = _datasets().load_dataset(dataset, config, split="train", streaming=True, revision=commit)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"inputs: got {spec!r}, which cannot be loaded: {error}") from error
    examples = iter(loaded.skip(skip) if skip else loaded)
    while True:
        try:
            example = next(examples, None)
        except Exception as error:
            raise ValueError(f"inputs: {spec} broke off, the same command goes on: {error}") from error
        if example is None:
            return
        yield example


def filesystem() -> Any:
    """The hub as a file system."""
    return _hub().HfFileSystem()


def _hub() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("datasets of the hub need huggingface-hub: pip install 'gape[hub]'") from error
    return huggingface_hub


def _datasets() -> Any:
    try:
        import datasets  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("datasets of the hub need the library datasets: pip install 'gape[hub]'") from error
    return datasets
