"""Files that are written whole or not at all, JSON, and locks on directories."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import lzma
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import IO, Any

#: Levels of lists and objects in JSON; our own files have ten at most.
MAX_DEPTH = 64
FULL = (errno.ENOSPC, errno.EDQUOT)


class _PlaceError(OSError):
    def __str__(self) -> str:
        return str(self.strerror)


class DiskFullError(_PlaceError):
    """Not enough room for a checkpoint or a log line: `needed` and `free` bytes. Earlier checkpoints are whole."""

    def __init__(self, what: str, path: Path, needed: int, free: int) -> None:
        message = f"no room for {what} in {path}: {size(needed)} needed, {size(free)} free; make room and start again"
        super().__init__(errno.ENOSPC, message)
        self.needed, self.free = needed, free


class LostDirectoryError(_PlaceError):
    """The directory of the work was moved or deleted while it went on."""

    def __init__(self, what: str, path: Path) -> None:
        super().__init__(errno.ENOENT, f"no place for {what}: {path} was there and is gone; put it back or start anew")


def size(n: int) -> str:
    """A number of bytes as people read it."""
    value = float(n)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


@contextlib.contextmanager
def create(path: Path) -> Iterator[IO[bytes]]:
    """A new file in the place of an old one, on the disk at the end; a link is removed, its target stays."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it. Every file of a run but the logs goes through here."""
    with create(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name for what takes the place of `path` at the end: a reader sees the old file or the new one, whole."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace(path: Path, data: bytes) -> None:
    """Put data in the place of `path` at once; DiskFullError when there is no room, and the old file stays."""
    with room(path.name, path.parent, len(data)):
        with replacing(path) as temporary:
            write(temporary, data)
        settle(path.parent)


def open_append(path: Path) -> FileIO:
    """A file to append to, made when missing, without a buffer; refuses a link, whose target may be any file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        return FileIO(os.open(path, flags, 0o666), "ab")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path}: got a symbolic link, expected a file; remove it") from error
        raise


def open_decompressed(path: Path) -> IO[bytes]:
    """The content of a file; one that ends in .gz or .xz is decompressed."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    file: IO[bytes] = openers.get(path.suffix, open)(path, "rb")
    return file


def foreign(directory: Path, mark: str) -> bool:
    """Whether a path is anything but a directory that is missing, empty or has the file `mark`."""
    if (directory / mark).is_file() or not directory.exists():
        return False
    # A death at the very start leaves the mark under a temporary name. File managers leave .DS_Store.
    ours = (f".tmp-{mark}", ".DS_Store")
    return not directory.is_dir() or any(not entry.name.startswith(ours) for entry in directory.iterdir())


def settle(directory: Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    # Windows cannot open a directory; its rename is journalled.
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot do this for a directory, and return EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def discard(directory: Path) -> None:
    """Delete a directory; a process killed meanwhile never leaves half of it under its name."""
    temporary = directory.with_name(f".tmp-discarded-{directory.name}-{os.getpid()}")
    directory.replace(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove the temporary files (.tmp-*) of killed processes in a directory."""
    for leftover in directory.glob(".tmp-*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


class BusyError(RuntimeError):
    """Another process trains or measures in the run's directory."""


@contextlib.contextmanager
def locked(directory: Path, action: str = "trained") -> Iterator[None]:
    """Lock a directory that exists; a BusyError where another process has it. The lock ends with the process.

    Temporary files (`.tmp-*`) that a killed process left in a run are removed. Locks do not nest: leaving the inner one
    releases both. `action` says what is being done, for the error of another process.
    """
    if os.name == "nt":
        yield
        return
    import fcntl  # noqa: PLC0415

    with open_append(directory / ".lock") as handle:
        try:
            # Not flock: a forked worker that outlives its parent would still hold that one.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            # What the other process is doing; it may not have written it yet.
            note = (directory / ".lock").read_text(encoding="utf-8", errors="replace")
            other, _, process = note.partition(" ")
            holder = f"{other or 'trained'} by another process" + (f" ({process})" if process else "")
            raise BusyError(f"{directory} is being {holder}; wait for it or use another") from error
        except OSError:
            # A file system without locks: better to work unguarded than not at all.
            yield
            return
        # For the error of another process; a full disk prevents this note, not the work.
        with contextlib.suppress(OSError):
            handle.truncate(0)
            handle.write(f"{action} {os.getpid()}".encode())
        # Leftovers of a run, never through links; a directory of another kind is left alone.
        checkpoints = directory / "checkpoints"
        for place in (directory, checkpoints) if checkpoints.is_dir() else ():
            if not place.is_symlink():
                sweep(place)
        yield


@contextlib.contextmanager
def room(what: str, directory: Path, needed: int) -> Iterator[None]:
    """A context that raises DiskFullError for a full disk, and LostDirectoryError where `directory` is gone."""
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        if not directory.is_dir():
            raise LostDirectoryError(what, directory) from error
        if error.errno not in FULL:
            raise
        raise DiskFullError(what, directory, needed, free(directory)) from error


def free(directory: Path) -> int:
    """Bytes that may still be written in a directory."""
    return shutil.disk_usage(directory).free


def occupied(directory: Path) -> int:
    """Bytes of the files under a directory."""
    return sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())


def sha256(data: bytes) -> str:
    """The digest in hex."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def to_json(value: Any, *, indent: int | None = 2) -> bytes:
    """UTF-8 JSON, keys in the order given, floats exact; NaN and infinities become the texts "nan" and "inf"."""
    text = json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def from_json(data: bytes) -> dict[str, Any]:
    """The object in a JSON file; a ValueError where the bytes are anything else."""
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inside = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in inside if isinstance(each, (dict, list))]
        if not level:
            return value
    # Recursive functions could not follow it.
    raise ValueError("JSON nested too deeply")


def plain(value: Any) -> Any:
    """The value in the types JSON has."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # Tensors and arrays.
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
