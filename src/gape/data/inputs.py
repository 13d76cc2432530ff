"""Inputs of a corpus: which files there are, identified before anything is read, and their documents, one at a time.

A file is text, JSON lines or Parquet, plain or compressed, on this machine or on the Hugging Face hub. Not read by the
library `datasets`: it ends a file at the first line that is not JSON, and keeps no line numbers, of which ids are made.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, cast

from gape.data.config import PrepareConfig
from gape.utils.files import file_sha256
from gape.utils.validation import optional

#: The endings of the names of files, and the kind each is; any of :data:`COMPRESSED` may follow.
KINDS = {
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet",
}  # fmt: skip
COMPRESSED = (".gz", ".xz", ".zst")
#: What an input of the hub begins with, and its form.
PREFIX = "hf:"
_FORM = re.compile(r"hf:(?P<dataset>[^@:#]+)(@(?P<revision>[^#]+))?#(?P<files>.+)")
#: Lines that are searched for one that shows which fields there are.
PROBED = 100
#: Rows of a Parquet file in memory at once.
ROWS = 64
BUFFER = 2**20
#: Bytes of a line and of a text file at most, which are held in memory.
LINE, TEXT = 2**28, 2**30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
EMPTY = "empty document"


@dataclass(frozen=True, kw_only=True)
class Input:
    """One file, on this machine or on the hub, where `place` opens it and `revision` is the commit of its dataset.

    `name` is its name, or its path from the folder given. The files of a folder have the same `group`. A `split` of
    None lets each document's id decide.
    """

    name: str
    group: int
    split: str | None
    size: int
    place: Path | Callable[[], IO[bytes]]
    revision: str | None = None

    @property
    def kind(self) -> str:
        """The kind of file, one of the values of :data:`KINDS`."""
        return kind_of(self.name)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the card says of it and a resume compares: its SHA-256, or the commit of its dataset."""
        fixed = {"sha256": file_sha256(self.place)} if isinstance(self.place, Path) else {"revision": self.revision}
        return {"name": self.name, "split": self.split, "bytes": self.size, **fixed}


class Fields(NamedTuple):
    """Names of the fields; `id` None takes "id" where there is one."""

    text: str = "text"
    id: str | None = None
    title: str = "title"


class Record(NamedTuple):
    """A line of JSON, a row, or a text file: its number from 1, what is in it, and the bytes of the file read so far.

    `problem` says why there is no document in it, `named` whether the id is the input's own and not made of the number.
    """

    number: int
    id: str
    title: str | None
    text: str
    position: int
    problem: str | None = None
    named: bool = True


def find(config: PrepareConfig) -> list[Input]:
    """Every input in order: held-out ones after the others, folders by sorted path. What cannot be read is refused."""
    specs = [(spec, None if config.heldout_fraction else "train") for spec in config.inputs]
    specs += [(spec, "heldout") for spec in config.heldout]
    sources = [
        source
        for group, (spec, split) in enumerate(specs)
        for source in (_hub_files(spec, group, split) if spec.startswith(PREFIX) else _local(spec, group, split))
    ]
    known: set[Path | str] = set()
    for source in sources:
        unique = source.place.resolve() if isinstance(source.place, Path) else source.name
        if unique in known:
            raise ValueError(f"inputs: {source.name} is given twice, expected every input once")
        known.add(unique)
    return sources


def _local(spec: str, group: int, split: str | None) -> Iterator[Input]:
    """The file of that name, or those of a folder that are of a known kind and not hidden."""
    path = Path(spec).expanduser()
    if path.is_file():
        kind_of(path.name)
        files = {path.name: path}
    elif path.is_dir():
        inside = {file.relative_to(path): file for file in sorted(path.rglob("*")) if file.is_file()}
        files = {
            f"{path.resolve().name}/{name.as_posix()}": file
            for name, file in inside.items()
            if _kind(name.name) and not any(part.startswith(".") for part in name.parts)
        }
    else:
        raise ValueError(f"inputs: got {spec!r}, expected a file, a folder or {PREFIX}DATASET#FILES; there is none")
    if not files:
        known = f"files .txt, .md, .jsonl, .json lines ({', '.join(COMPRESSED)} after them) or .parquet"
        raise ValueError(f"inputs: got the folder {spec!r}, which has no documents: expected {known}")
    for name, file in files.items():
        yield Input(name=name, group=group, split=split, size=file.stat().st_size, place=file)


def _hub_files(spec: str, group: int, split: str | None) -> Iterator[Input]:
    """The files of a dataset of the hub that match a pattern, by sorted path; the commit is fixed for a resume."""
    if (match := _FORM.fullmatch(spec)) is None:
        form = "hf:DATASET[@REVISION]#FILES, such as hf:OWNER/NAME#data/*.jsonl"
        raise ValueError(f"inputs: got {spec!r}, expected {form}")
    dataset, commit = match["dataset"], revision(match["dataset"], match["revision"])
    system, root = filesystem(), f"datasets/{dataset}@{commit}/"
    matches = system.glob(f"{root}{match['files']}", detail=True)
    chosen = sorted((path, info["size"]) for path, info in matches.items() if info["type"] == "file")
    if not chosen:
        raise ValueError(f"inputs: got {spec!r}, expected a pattern of files that the dataset has")
    for path, size in chosen:
        name, opener = f"{PREFIX}{dataset}#{path.removeprefix(root)}", partial(system.open, path, "rb")
        kind_of(name)
        yield Input(name=name, group=group, split=split, size=size, place=opener, revision=commit)


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


def filesystem() -> Any:
    """The hub as a file system."""
    return _hub().HfFileSystem()


def _hub() -> Any:
    return optional("files of the hub need huggingface-hub", "hub", "huggingface_hub")


def kind_of(file: str) -> str:
    """The kind of a file by its name; refuses what is of no kind that is read."""
    if kind := _kind(file):
        return kind
    raise ValueError(f"inputs: got {file!r}, expected a name that ends in {', '.join(KINDS)}, or one compressed")


def _kind(file: str) -> str | None:
    name = file.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)


def probe(sources: list[Input], fields: Fields) -> None:
    """Refuse inputs that cannot be read or lack a field; of many files on the hub, the first is looked at."""
    probes = {"jsonl": _probe_lines, "parquet": _probe_parquet}
    probed = set()
    for source in sources:
        if source.kind in probes and (isinstance(source.place, Path) or source.group not in probed):
            probes[source.kind](source, fields)
        probed.add(source.group)


def records(source: Input, fields: Fields, skip: int) -> Iterator[Record]:
    """The records of an input after the first `skip`, bad ones among them."""
    readers = {"text": _read_text, "jsonl": _read_lines, "parquet": _read_parquet}
    return readers[source.kind](source, fields, skip)


def _read_text(source: Input, fields: Fields, skip: int) -> Iterator[Record]:
    """The one record of a text file: all of it."""
    if skip:
        return
    data = bytearray()
    with _open(source) as (stream, _):
        for _, line in _lines(stream, source.name):
            data += line
            if len(data) > TEXT:
                raise ValueError(f"inputs: {source.name} has more than {TEXT:,} bytes, expected a text of at most that")
    try:
        text = data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        yield Record(1, "", None, "", source.size, f"not UTF-8: {error.reason} at byte {error.start}")
        return
    yield _check_text(Record(1, source.name, None, text, source.size))


def _probe_lines(source: Input, fields: Fields) -> None:
    """Refuse JSON lines whose first object lacks a field."""
    with _open(source) as (stream, _):
        for number, line in _lines(stream, source.name):
            value = _object(line)
            if isinstance(value, dict):
                _require_fields(source.name, value, fields)
                return
            if number >= PROBED:
                break
        else:
            # A file without a line has no documents, which is an error only if no other file has any.
            if not source.size:
                return
    raise ValueError(f"inputs: {source.name}: none of its first {PROBED} lines is a JSON object")


def _read_lines(source: Input, fields: Fields, skip: int) -> Iterator[Record]:
    """A record for each line that is not blank; a document is a JSON object."""
    with _open(source) as (stream, raw):
        for number, line in _lines(stream, source.name):
            if number <= skip or not line.strip():
                continue
            value = _object(line)
            if isinstance(value, str):
                yield Record(number, "", None, "", raw.tell(), value)
            else:
                yield _document(value, fields, source.name, number, raw.tell())


def _probe_parquet(source: Input, fields: Fields) -> None:
    """Refuse a Parquet file that lacks a column."""
    with _open(source) as (_, raw):
        _require_fields(source.name, dict.fromkeys(_columns(source, raw)), fields)


def _read_parquet(source: Input, fields: Fields, skip: int) -> Iterator[Record]:
    """A record for each row."""
    with _open(source) as (_, raw):
        names = {fields.text, fields.id or "id", fields.title}
        columns = [name for name in _columns(source, raw) if name in names]
        number = 0
        for batch in _arrow("pyarrow.parquet").ParquetFile(raw).iter_batches(batch_size=ROWS, columns=columns):
            if number + batch.num_rows <= skip:
                number += batch.num_rows
                continue
            for row in batch.to_pylist():
                number += 1
                if number > skip:
                    yield _document(row, fields, source.name, number, min(raw.tell(), source.size))


def _columns(source: Input, raw: IO[bytes]) -> list[str]:
    library = _arrow("pyarrow.parquet")
    try:
        names: list[str] = library.ParquetFile(raw).schema_arrow.names
    # pyarrow raises many kinds of error for a file of another format.
    except Exception as error:
        raise ValueError(f"inputs: {source.name} is no Parquet file: {error}") from error
    raw.seek(0)
    return names


def _document(value: Mapping[str, Any], fields: Fields, name: str, number: int, position: int) -> Record:
    """The record of an object; a missing field, an empty or an invalid text is its problem."""
    text, title, identifier = (value.get(field) for field in (fields.text, fields.title, fields.id or "id"))
    problem = None
    if not isinstance(text, str):
        problem = f"field {fields.text} is {type(text).__name__}" if fields.text in value else f"no field {fields.text}"
    elif identifier is None and fields.id is not None:
        problem = f"no field {fields.id}"
    if problem:
        return Record(number, "", None, "", position, problem)
    named = identifier is not None
    identifier, title = str(identifier) if named else f"{name}:{number}", None if title is None else str(title)
    return _check_text(Record(number, identifier, title, str(text), position, named=named))


def _require_fields(name: str, value: Mapping[str, Any], fields: Fields) -> None:
    for option, field in (("text_field", fields.text), ("id_field", fields.id)):
        if field is not None and field not in value:
            raise ValueError(f"{option}: got {field!r}, expected a field that {name} has: {', '.join(value)}")


def _check_text(record: Record) -> Record:
    """The record, with a problem where its text is empty or no Unicode."""
    if not record.text.strip():
        return record._replace(text="", problem=EMPTY)
    try:
        "".join((record.text, record.id, record.title or "")).encode()
    except UnicodeEncodeError:
        return record._replace(id="", title=None, text="", problem="not Unicode: half of a surrogate pair")
    return record


def _object(line: bytes) -> dict[str, Any] | str:
    """The object on a line, or what is wrong with it."""
    try:
        value = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    return value if isinstance(value, dict) else f"not a JSON object but {type(value).__name__}"


def _lines(stream: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers from 1; refuses a file that is broken or cut short, and a line that is too long."""
    number = 0
    while True:
        try:
            line = stream.readline(LINE + 1)
        # Every compression has errors of its own.
        except Exception as error:
            raise ValueError(f"inputs: {name} cannot be read after line {number}: {error}") from error
        if not line:
            return
        number += 1
        if len(line) > LINE:
            raise ValueError(f"inputs: {name}: line {number} has more than {LINE:,} bytes, expected at most that")
        yield number, line


@contextmanager
def _open(source: Input) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file as (its content, the file itself); the position in the second says how far the reading is."""
    with source.place.open("rb") if isinstance(source.place, Path) else source.place() as raw:
        content: Any = raw
        match PurePosixPath(source.name).suffix.lower():
            case ".gz":
                content = gzip.GzipFile(fileobj=raw)
            case ".xz":
                content = lzma.LZMAFile(raw)  # noqa: SIM115
            case ".zst":
                # It refuses a file that breaks off, where the reader of zstandard takes it for a whole one.
                library = _arrow("pyarrow")
                content = library.CompressedInputStream(library.PythonFile(raw), "zstd")
        # Files of the hub have a readline that takes no limit.
        yield cast(IO[bytes], io.BufferedReader(content, BUFFER)), raw


def _arrow(module: str) -> Any:
    return optional("Parquet files and those ending in .zst need pyarrow", "data", module)
