"""Documents from files: text, JSON lines and Parquet, plain or compressed, one record at a time.

The library `datasets` would end a whole file at the first line that is not JSON or not Unicode, without that line's
number; it has no bound on the length of a line; and it keeps neither line numbers, of which ids are made, nor places in
the file, by which progress is shown.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple, cast

#: Lines that are searched for one that shows which fields there are.
PROBED = 100
#: Rows of a Parquet file in memory at once.
ROWS = 64
BUFFER = 2**20
#: Bytes of a line and of a text file at most, which are held in memory.
LINE, TEXT = 2**28, 2**30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
EMPTY = "empty document"


@dataclass(frozen=True)
class Input:
    """One file.

    Attributes:
        name: what it is called in ids, messages and the card: a file's name, or its path from the folder given.
        group: the number of the input as it was given; the files of a folder share it.
        kind: "text", "jsonl" or "parquet".
        split: "train", "heldout", or None where each document's id decides.
        size: bytes of the file.
        open: opens the file.
        identity: what the card says of it and a resume compares: its SHA-256, or the commit of its dataset.
    """

    name: str
    group: int
    kind: str
    split: str | None
    size: int
    open: Callable[[], IO[bytes]]
    identity: dict[str, Any]


class Fields(NamedTuple):
    """Names of the fields; `id` None takes "id" where there is one."""

    text: str = "text"
    id: str | None = None
    title: str = "title"


class Record(NamedTuple):
    """A line of JSON, a row, or a text file.

    Attributes:
        number: of the line or row, from 1.
        id, title, text: of the document; empty where there is a problem.
        position: bytes of the file read so far.
        problem: why there is no document in it, or None.
        named: whether the id is the input's own, and not made of its name and the number.
    """

    number: int
    id: str
    title: str | None
    text: str
    position: int
    problem: str | None = None
    named: bool = True


def read_text(source: Input, fields: Fields, skip: int) -> Iterator[Record]:
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


def probe_lines(source: Input, fields: Fields) -> None:
    """Refuse JSON lines whose first object lacks a field."""
    with _open(source) as (stream, _):
        for number, line in _lines(stream, source.name):
            value = _object(line)
            if isinstance(value, dict):
                require_fields(source.name, value, fields)
                return
            if number >= PROBED:
                break
        else:
            # A file without a line has no documents, which is an error only if no other file has any.
            if not source.size:
                return
    raise ValueError(f"inputs: {source.name}: none of its first {PROBED} lines is a JSON object")


def read_lines(source: Input, fields: Fields, skip: int) -> Iterator[Record]:
    """A record for each line that is not blank; a document is a JSON object."""
    with _open(source) as (stream, raw):
        for number, line in _lines(stream, source.name):
            if number <= skip or not line.strip():
                continue
            value = _object(line)
            if isinstance(value, str):
                yield Record(number, "", None, "", raw.tell(), value)
            else:
                yield document(value, fields, source.name, number, raw.tell())


def probe_parquet(source: Input, fields: Fields) -> None:
    """Refuse a Parquet file that lacks a column."""
    with _open(source) as (_, raw):
        require_fields(source.name, dict.fromkeys(_columns(source, raw)), fields)


def read_parquet(source: Input, fields: Fields, skip: int) -> Iterator[Record]:
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
                    yield document(row, fields, source.name, number, min(raw.tell(), source.size))


def _columns(source: Input, raw: IO[bytes]) -> list[str]:
    library = _arrow("pyarrow.parquet")
    try:
        names: list[str] = library.ParquetFile(raw).schema_arrow.names
    # pyarrow raises many kinds of error for a file of another format.
    except Exception as error:
        raise ValueError(f"inputs: {source.name} is no Parquet file: {error}") from error
    raw.seek(0)
    return names


def document(value: Mapping[str, Any], fields: Fields, name: str, number: int, position: int) -> Record:
    """The record of an object; a missing field, an empty or an invalid text is its problem."""
    text, title = value.get(fields.text), value.get(fields.title)
    identifier = value.get(fields.id or "id")
    if not isinstance(text, str):
        problem = f"field {fields.text} is {type(text).__name__}" if fields.text in value else f"no field {fields.text}"
        return Record(number, "", None, "", position, problem)
    if identifier is None and fields.id is not None:
        return Record(number, "", None, "", position, f"no field {fields.id}")
    named = identifier is not None
    identifier, title = str(identifier) if named else f"{name}:{number}", None if title is None else str(title)
    return _check_text(Record(number, identifier, title, text, position, named=named))


def require_fields(name: str, value: Mapping[str, Any], fields: Fields) -> None:
    """Refuse an input without one of the fields."""
    for option, field in (("text_field", fields.text), ("id_field", fields.id)):
        if field is not None and field not in value:
            raise ValueError(f"{option}: got {field!r}, expected a field that {name} has: {', '.join(value)}")


def kind_of(file: str) -> str:
    """The kind of a file by its name.

    Raises:
        ValueError: it is of no kind that is read.
    """
    name = file.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    for ending, kind in KINDS.items():
        if name.endswith(ending):
            return kind
    known = ", ".join(KINDS)
    raise ValueError(f"inputs: got {file!r}, expected a name that ends in {known}, or one of these compressed")


def _check_text(record: Record) -> Record:
    """The record, with a problem where its text is empty or no Unicode."""
    if not record.text.strip():
        return record._replace(text="", problem=EMPTY)
    for part in (record.text, record.id, record.title or ""):
        try:
            part.encode()
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
    """The lines with their numbers from 1.

    Raises:
        ValueError: the file is broken or cut short; says after which line. Or a line is too long.
    """
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
    decompress = COMPRESSED.get(PurePosixPath(source.name).suffix.lower(), _plain)
    with source.open() as raw:
        yield decompress(raw), raw


def _plain(raw: IO[bytes]) -> IO[bytes]:
    # Files of the hub have a readline that takes no limit.
    return cast(IO[bytes], io.BufferedReader(cast(Any, raw), BUFFER))


def _gzip(raw: IO[bytes]) -> IO[bytes]:
    return _plain(cast(IO[bytes], gzip.GzipFile(fileobj=raw)))


def _xz(raw: IO[bytes]) -> IO[bytes]:
    return _plain(cast(IO[bytes], lzma.LZMAFile(raw)))


def _zstd(raw: IO[bytes]) -> IO[bytes]:
    # It refuses a file that breaks off, where the reader of zstandard takes it for a whole one.
    library = _arrow("pyarrow")
    return _plain(cast(IO[bytes], library.CompressedInputStream(library.PythonFile(raw), "zstd")))


def _arrow(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError("Parquet files and those ending in .zst need pyarrow: pip install 'gape[data]'") from error


COMPRESSED: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {".gz": _gzip, ".xz": _xz, ".zst": _zstd}
#: The endings of the names of files, and the kind each is.
KINDS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
