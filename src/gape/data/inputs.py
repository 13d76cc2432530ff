"""Inputs of a corpus, identified before anything is read: files, folders, and datasets of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from gape.data import readers
from gape.data.config import PrepareConfig
from gape.data.readers import COMPRESSED, Fields, Input, Record, document, kind_of, require_fields
from gape.utils.files import file_sha256


def find(config: PrepareConfig) -> list[Input]:
    """Every input in order: held-out ones after the others, folders by sorted path.

    Raises:
        ValueError: a path that does not exist, a file of unknown kind, a folder without documents, a file given twice.
    """
    given = [(spec, None if config.heldout_fraction else "train") for spec in config.inputs]
    given += [(spec, "heldout") for spec in config.heldout]
    sources = [
        (name, group, split, place)
        for group, (spec, split) in enumerate(given)
        for name, place in (_remote(spec) if spec.startswith(PREFIX) else _local(spec))
    ]
    known: set[Path | str] = set()
    for name, _, _, place in sources:
        unique = place.resolve() if isinstance(place, Path) else name
        if unique in known:
            raise ValueError(f"inputs: {name} is given twice, expected every input once")
        known.add(unique)
    return [_identify(*source) for source in sources]


def probe(sources: list[Input], fields: Fields) -> None:
    """Make sure that the inputs can be read and have the fields; of many files on the hub, the first.

    Raises:
        ValueError: one has not; names the fields there are.
    """
    probed = set()
    for source in sources:
        if source.kind in PROBES and ("sha256" in source.identity or source.group not in probed):
            PROBES[source.kind](source, fields)
        probed.add(source.group)


def records(source: Input, fields: Fields, skip: int) -> Iterator[Record]:
    """The records of an input after the first `skip`, bad ones among them."""
    return READERS[source.kind](source, fields, skip)


def _remote(spec: str) -> Iterator[tuple[str, File | None]]:
    if parse(spec).files is None:
        yield spec, None
        return
    for file in files(spec):
        kind_of(file.name)
        yield file.name, file


def _local(spec: str) -> Iterator[tuple[str, Path]]:
    path = Path(spec).expanduser()
    if path.is_file():
        kind_of(path.name)
        yield path.name, path
        return
    if not path.is_dir():
        raise ValueError(f"inputs: got {spec!r}, expected a file, a folder or {PREFIX}DATASET; there is none")
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and _is_input(path, file)]
    if not files:
        known = f"files .txt, .md, .jsonl, .json lines ({', '.join(COMPRESSED)} after them) or .parquet"
        raise ValueError(f"inputs: got the folder {spec!r}, which has no documents: expected {known}")
    for file in files:
        yield f"{path.resolve().name}/{file.relative_to(path).as_posix()}", file


def _is_input(folder: Path, file: Path) -> bool:
    """Whether a file of a folder is read: of a known kind, nothing hidden."""
    inside = PurePosixPath(file.relative_to(folder).as_posix())
    try:
        kind_of(inside.name)
    except ValueError:
        return False
    return not any(part.startswith(".") for part in inside.parts)


def _identify(name: str, group: int, split: str | None, place: Path | File | None) -> Input:
    """An input with what identifies it: a file here (a path), a file on the hub, or a whole dataset (None)."""
    facts: dict[str, Any] = {"name": name, "split": split}
    if place is None:
        return Input(name, group, "dataset", split, 0, None, facts | {"revision": revision(name)})
    if isinstance(place, File):
        facts |= {"bytes": place.size, "revision": place.revision}
        return Input(name, group, kind_of(name), split, place.size, place.open, facts)
    size = place.stat().st_size
    facts |= {"bytes": size, "sha256": file_sha256(place)}
    return Input(name, group, kind_of(name), split, size, lambda: place.open("rb"), facts)


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
    dataset, given, _, _ = parse(spec)
    if Path(dataset).exists():
        return None
    try:
        commit: str | None = _hub().HfApi().dataset_info(dataset, revision=given).sha
    # Errors of the network or the hub, of many kinds.
    except Exception as error:
        raise ValueError(f"inputs: got {spec!r}, which the hub does not give: {error}") from error
    return commit


def files(spec: str) -> list[File]:
    """The files of a dataset that match the pattern, by sorted path. They are read line by line, as local files are.

    Unlike the loader of `datasets`, this accepts files whose other fields differ, and a resume does not open files
    that are done.

    Raises:
        ValueError: there is no such dataset, or no such file in it.
    """
    dataset, _, _, pattern = parse(spec)
    commit = revision(spec)
    system, root = filesystem(), f"datasets/{dataset}@{commit}/"
    matches = system.glob(f"{root}{pattern}", detail=True)
    chosen = sorted((path, info["size"]) for path, info in matches.items() if info["type"] == "file")
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
        loaded = datasets_library().load_dataset(dataset, config, split="train", streaming=True, revision=commit)
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


def _probe_dataset(source: Input, fields: Fields) -> None:
    """Refuse a dataset whose first example lacks a field."""
    for value in stream(source.name, source.identity.get("revision"), 0):
        require_fields(source.name, value, fields)
        return
    raise ValueError(f"inputs: {source.name} has no examples")


def _read_dataset(source: Input, fields: Fields, skip: int) -> Iterator[Record]:
    """A record for each example."""
    examples = stream(source.name, source.identity.get("revision"), skip)
    for number, value in enumerate(examples, start=skip + 1):
        yield document(value, fields, source.name, number, 0)


#: By kind of input: refuses one without the fields.
PROBES: dict[str, Callable[[Input, Fields], None]] = {
    "jsonl": readers.probe_lines,
    "parquet": readers.probe_parquet,
    "dataset": _probe_dataset,
}
#: By kind of input: its records after the first `skip`.
READERS: dict[str, Callable[[Input, Fields, int], Iterator[Record]]] = {
    "text": readers.read_text,
    "jsonl": readers.read_lines,
    "parquet": readers.read_parquet,
    "dataset": _read_dataset,
}


def filesystem() -> Any:
    """The hub as a file system."""
    return _hub().HfFileSystem()


def _hub() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("datasets of the hub need huggingface-hub: pip install 'gape[hub]'") from error
    return huggingface_hub


def datasets_library() -> Any:
    """The library `datasets`.

    Raises:
        ImportError: it is missing; says how to install it.
    """
    try:
        import datasets  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("datasets of the hub need the library datasets: pip install 'gape[hub]'") from error
    return datasets
