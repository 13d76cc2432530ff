"""Small documents that differ, and corpora made of them in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gape.data import Corpus, PrepareConfig, prepare


def texts(n: int, *, longest: int = 120) -> list[dict[str, Any]]:
    """n documents of 1 to `longest` letters or so, with ids and titles."""
    documents = []
    for i in range(n):
        words = " ".join(f"w{i}-{j}é" for j in range(1 + (i * 7) % (longest // 6)))
        documents.append({"id": f"doc-{i}", "title": f"Book {i}", "text": words})
    return documents


def write_lines(path: Path, rows: list[Any]) -> Path:
    """A file of JSON lines; strings and bytes go in as they are."""
    lines = [
        row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode()
        for row in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def make(directory: Path, *inputs: Path | str, **settings: Any) -> Corpus:
    """A corpus of bytes, tokenised here."""
    config = PrepareConfig(inputs=tuple(map(str, inputs)), **{"tokenizer": "bytes", **settings})
    return prepare(config, directory)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file under a directory."""
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def read(corpus: Corpus, split: str = "train", stratum: str | None = None) -> dict[str, str]:
    """Ids and texts of a corpus of bytes."""
    return {
        d.id: bytes(t for t in corpus.tokens(d).tolist() if t < 256).decode() for d in corpus.documents(split, stratum)
    }
