"""A corpus is what was prepared, or it is not opened."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from gape.data import open_corpus
from gape.data.shards import RECORD
from tests.data.books import make, texts, write_lines


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "books.jsonl", texts(40))


def test_a_broken_corpus_is_not_opened(tmp_path: Path, lines: Path) -> None:
    corpus = make(tmp_path / "c", lines)
    corpus.verify()
    shard = tmp_path / "c" / "tokens-00000.bin"
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"changed since it was prepared: tokens-00000\.bin"):
        open_corpus(tmp_path / "c").verify()
    shard.write_bytes(data[:-2])
    with pytest.raises(ValueError, match=r"tokens-00000\.bin has \d+ bytes, expected"):
        open_corpus(tmp_path / "c")
    (tmp_path / "c" / "card.json").unlink()
    with pytest.raises(ValueError, match="was not finished; run the same command again"):
        open_corpus(tmp_path / "c")
    with pytest.raises(ValueError, match=r"expected a directory that gape data prepare wrote: there is no card\.json"):
        open_corpus(tmp_path / "nowhere")


@pytest.mark.parametrize("field", ["shard", "split", "stratum", "offset", "length", "name"])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, lines: Path, field: str) -> None:
    """Under hashes that fit it."""
    corpus = make(tmp_path / "c", lines)
    records = np.fromfile(tmp_path / "c" / "index.bin", RECORD)
    records[field][3] = np.iinfo(records[field].dtype).max
    records.tofile(tmp_path / "c" / "index.bin")
    corpus.card["index"]["sha256"] = hashlib.sha256(records.tobytes()).hexdigest()
    (tmp_path / "c" / "card.json").write_text(json.dumps(corpus.card))
    with pytest.raises(ValueError, match=r"index\.bin"):
        open_corpus(tmp_path / "c").verify()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": []}, "shards"),
        ({"dtype": "object"}, "dtype"),
        ({"index": {"file": "../x", "bytes": 4, "sha256": hashlib.sha256(b"1234").hexdigest()}}, "file"),
        ({"tokenizer": 5}, "no card"),
    ],
)
def test_a_card_that_no_corpus_has_is_refused(tmp_path: Path, lines: Path, changes: dict, message: str) -> None:
    corpus = make(tmp_path / "c", lines)
    (tmp_path / "x").write_bytes(b"1234")
    (tmp_path / "c" / "card.json").write_text(json.dumps(corpus.card | changes))
    with pytest.raises(ValueError, match=rf"card\.json.*{message}"):
        open_corpus(tmp_path / "c").verify()
