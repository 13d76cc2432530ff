"""Inputs of a corpus, identified before anything is read: files, folders, and files of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from gape.data import readers
from gape.data.config import PrepareConfig
from gape.data.readers import COMPRESSED, Fields, Input, Record, kind_of
from gape.utils.files import file_sha256


def find(config: PrepareConfig) -> list[Input]:
    """Every input in order: held-out ones after the others, folders by sorted path.

    Raises:
        ValueError: a path that does not exist, a file of unknown kind, a folder without documents, a file given twice.
    """
    specs = [(spec, None if config.heldout_fraction else "train") for spec in config.inputs]
    specs += [(spec, "heldout") for spec in config.heldout]
    sources = [
        (name, group, split, place)
        for group, (spec, split) in enumerate(specs)
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


def _remote(spec: str) -> Iterator[tuple[str, File]]:
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
        raise ValueError(f"inputs: got {spec!r}, expected a file, a folder or {PREFIX}DATASET#FILES; there is none")
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


def _identify(name: str, group: int, split: str | None, place: Path | File) -> Input:
    """An input with what identifies it."""
    facts: dict[str, Any] = {"name": name, "split": split}
    if isinstance(place, File):
        facts |= {"bytes": place.size, "revision": place.revision}
        return Input(name, group, kind_of(name), split, place.size, place.open, facts)
    size = place.stat().st_size
    facts |= {"bytes": size, "sha256": file_sha256(place)}
    return Input(name, group, kind_of(name), split, size, lambda: place.open("rb"), facts)


PREFIX = "hf:"
_FORM = re.compile(r"hf:(?P<dataset>[^@:#]+)(@(?P<revision>[^#]+))?#(?P<files>.+)")


class File(NamedTuple):
    """A file of a dataset's repository: its name with the dataset's, its size, the commit, and how to open it."""

    name: str
    size: int
    revision: str | None
    open: Callable[[], IO[bytes]]


def files(spec: str) -> list[File]:
    """The files of a dataset of the hub that match a pattern, by sorted path; they are read as local files are.

    Unlike the library `datasets`, this accepts files whose other fields differ. The commit is fixed for a resume.

    Raises:
        ValueError: the hub cannot be reached, or has no such dataset, or no such file in it.
    """
    match = _FORM.fullmatch(spec)
    if match is None:
        raise ValueError(
            f"inputs: got {spec!r}, expected hf:DATASET[@REVISION]#FILES, such as hf:OWNER/NAME#data/*.jsonl"
        )
    dataset, commit = match["dataset"], revision(match["dataset"], match["revision"])
    system, root = filesystem(), f"datasets/{dataset}@{commit}/"
    matches = system.glob(f"{root}{match['files']}", detail=True)
    chosen = sorted((path, info["size"]) for path, info in matches.items() if info["type"] == "file")
    if not chosen:
        raise ValueError(f"inputs: got {spec!r}, expected a pattern of files that the dataset has")

    def opener(path: str) -> Callable[[], IO[bytes]]:
        return lambda: system.open(path, "rb")

    return [File(f"{PREFIX}{dataset}#{path.removeprefix(root)}", size, commit, opener(path)) for path, size in chosen]


def revision(dataset: str, wanted: str | None) -> str | None:
    """The commit a dataset is read at."""
    try:
        commit: str | None = _hub().HfApi().dataset_info(dataset, revision=wanted).sha
    except ImportError:
        raise
    # Errors of the network or the hub, of many kinds.
    except Exception as error:
        raise ValueError(f"inputs: got {PREFIX}{dataset}, which the hub does not give: {error}") from error
    return commit


#: By kind of input: refuses one without the fields.
PROBES: dict[str, Callable[[Input, Fields], None]] = {"jsonl": readers.probe_lines, "parquet": readers.probe_parquet}
#: By kind of input: its records after the first `skip`.
READERS: dict[str, Callable[[Input, Fields, int], Iterator[Record]]] = {
    "text": readers.read_text,
    "jsonl": readers.read_lines,
    "parquet": readers.read_parquet,
}


def filesystem() -> Any:
    """The hub as a file system."""
    return _hub().HfFileSystem()


def _hub() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("files of the hub need huggingface-hub: pip install 'gape[hub]'") from error
    return huggingface_hub
