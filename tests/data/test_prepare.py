"""From documents to a corpus: every kind of input, splits, strata, what is bad, and what is refused."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from gape.data import inputs, open_corpus
from tests.data.books import contents, make, read, texts, write_lines

ROWS = texts(40)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "books.jsonl", ROWS)


def test_a_corpus_holds_its_documents_in_order(tmp_path: Path, lines: Path) -> None:
    corpus = make(tmp_path / "c", lines, shard_tokens=300)
    documents = corpus.documents("train")
    assert [(d.id, d.title) for d in documents] == [(row["id"], row["title"]) for row in ROWS]
    assert read(corpus) == {row["id"]: row["text"] for row in ROWS}
    assert len(corpus.card["shards"]) > 3
    assert {d.stratum for d in documents} == {None}
    tokens = corpus.tokens(documents[3])
    assert (tokens.dtype, tokens[-1], len(tokens)) == (np.uint16, corpus.end_of_text, documents[3].length)
    assert not tokens.flags.writeable
    np.testing.assert_array_equal(corpus.tokens(documents[3], 2, 5), tokens[2:5])
    with pytest.raises(ValueError, match="start, stop: got 0 and 9999"):
        corpus.tokens(documents[3], 0, 9999)


def _xz(path: Path) -> Path:
    out = path.with_name("b.jsonl.xz")
    out.write_bytes(lzma.compress(path.read_bytes()))
    return out


def _gz(path: Path) -> Path:
    out = path.with_name("b.jsonl.gz")
    out.write_bytes(gzip.compress(path.read_bytes()))
    return out


def _zst(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    out = path.with_name("b.jsonl.zst")
    half = path.read_bytes()
    # Two frames, as pzstd writes them.
    frames = [pyarrow.compress(part, "zstd", asbytes=True) for part in (half[:500], half[500:])]
    out.write_bytes(b"".join(frames))
    return out


def _parquet(path: Path) -> Path:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    out = path.with_name("b.parquet")
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out, row_group_size=7)
    return out


@pytest.mark.parametrize("convert", [_gz, _xz, _zst, _parquet])
def test_every_format_gives_the_same_shards(tmp_path: Path, lines: Path, convert) -> None:
    plain, other = make(tmp_path / "a", lines), make(tmp_path / "b", convert(lines))
    assert other.fingerprint() == plain.fingerprint()


def test_a_zst_that_breaks_off_is_refused(tmp_path: Path, lines: Path) -> None:
    cut = _zst(lines)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b\.jsonl\.zst cannot be read after line \d+"):
        make(tmp_path / "c", cut, max_bad=0.5)


@pytest.mark.parametrize("convert", [lambda path: path, _gz, _xz, _zst])
def test_a_line_that_is_too_long_is_named(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch, convert
) -> None:
    monkeypatch.setattr("gape.data.inputs.LINE", 1000, raising=False)
    write_lines(lines, [*ROWS[:4], {"text": "x" * 2000}])
    with pytest.raises(ValueError, match=r"b.*\.jsonl.*: line 5 has more than"):
        make(tmp_path / "c", convert(lines))


class Hub:
    """A file system with the files of a dataset at a commit."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def glob(self, pattern: str, detail: bool) -> dict[str, dict[str, object]]:
        assert detail
        kinds = {path: "directory" if path.is_dir() else "file" for path in self.home.glob(pattern)}
        return {
            path.relative_to(self.home).as_posix(): {"size": path.stat().st_size, "type": kind}
            for path, kind in kinds.items()
        }

    def open(self, path: str, mode: str) -> IO[bytes]:
        return (self.home / path).open(mode)


def test_files_of_a_dataset_are_read_in_order(tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "hub" / "datasets" / "a" / "b@abc123" / "data"
    for folder, rows in (("x-2e13", ROWS[20:]), ("w-2e13", ROWS[:20]), ("x-2e14", ROWS[:3])):
        (data / folder).mkdir(parents=True)
        packed = lzma.compress(write_lines(tmp_path / "plain", rows).read_bytes())
        (data / folder / "0.jsonl.xz").write_bytes(packed)
    monkeypatch.setattr(inputs, "filesystem", lambda: Hub(tmp_path / "hub"))
    monkeypatch.setattr(inputs, "revision", lambda dataset, given: "abc123")
    corpus = make(tmp_path / "c", "hf:a/b#data/*-2e13/*")
    assert corpus.fingerprint() == make(tmp_path / "d", lines).fingerprint()
    assert [(source["name"], source["revision"]) for source in corpus.card["sources"]] == [
        ("hf:a/b#data/w-2e13/0.jsonl.xz", "abc123"), ("hf:a/b#data/x-2e13/0.jsonl.xz", "abc123"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="expected a pattern of files that the dataset has"):
        make(tmp_path / "e", "hf:a/b#data/*-2e15/*")


def test_a_folder_of_texts_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "z.txt").write_text("last")
    (folder / "b" / "a.md").write_text("first")
    (folder / "b" / "c.txt.xz").write_bytes(lzma.compress(b"\xef\xbb\xbfmiddle\r\n"))
    (folder / ".hidden.txt").write_text("no")
    (folder / "picture.png").write_bytes(b"no")
    assert read(make(tmp_path / "c", folder)) == {
        "texts/b/a.md": "first", "texts/b/c.txt.xz": "middle\r\n", "texts/z.txt": "last",
    }  # fmt: skip


def test_bad_lines_are_counted_and_named(tmp_path: Path) -> None:
    rows = [
        {"text": "good"}, "{broken", "[1, 2]", {"body": "x"}, {"text": 5}, "", {"text": " \n"}, b"\xff{}",
        '{"text": "\\ud800"}', {"text": "good too", "id": 7},
    ]  # fmt: skip
    corpus = make(tmp_path / "c", write_lines(tmp_path / "mixed.jsonl", rows), max_bad=7)
    assert read(corpus) == {"mixed.jsonl:1": "good", "7": "good too"}
    assert [(bad["number"], bad["reason"].split(":")[0]) for bad in corpus.card["bad"]] == [
        (2, "not JSON"), (3, "not a JSON object but list"), (4, "no field text"), (5, "field text is int"),
        (7, "empty document"), (8, "not UTF-8"), (9, "not Unicode"),
    ]  # fmt: skip
    assert corpus.card["left_out"] == {
        "empty": 1, "bad": 6, "outside_strata": 0, "train_documents_also_held_out": 0,
    }  # fmt: skip
    assert corpus.card["records_read"] == 9
    assert "mixed.jsonl, line 2: not JSON" in (tmp_path / "c" / "card.md").read_text()


@pytest.mark.parametrize(("limit", "passes"), [(0, False), (1, False), (2, True), (0.04, False), (0.05, True)])
def test_bad_lines_are_let_pass_up_to_a_limit(tmp_path: Path, limit: float, passes: bool) -> None:
    lines = write_lines(tmp_path / "b.jsonl", [*ROWS[:38], "{", "{"])
    if passes:
        assert len(make(tmp_path / "c", lines, max_bad=limit).documents("train")) == 38
        return
    with pytest.raises(ValueError, match=r"max_bad: . of .* expected at most .*b\.jsonl, line 39: not JSON"):
        make(tmp_path / "c", lines, max_bad=limit)
    # The limit shapes nothing: a higher one goes on in the same place.
    assert len(make(tmp_path / "c", lines, max_bad=0.5).documents("train")) == 38


def test_a_split_by_fraction_follows_the_id_and_not_the_order(tmp_path: Path) -> None:
    rows = texts(200)
    one = make(tmp_path / "a", write_lines(tmp_path / "a.jsonl", rows), heldout_fraction=0.3)
    two = make(tmp_path / "b", write_lines(tmp_path / "b.jsonl", rows[::-1]), heldout_fraction=0.3)
    heldout = [set(read(corpus, "heldout")) for corpus in (one, two)]
    assert heldout[0] == heldout[1]
    assert 40 < len(heldout[0]) < 80
    assert heldout[0].isdisjoint(read(one))
    assert len(read(one)) + len(heldout[0]) == 200
    other_seed = make(tmp_path / "c", tmp_path / "a.jsonl", heldout_fraction=0.3, seed=1)
    assert set(read(other_seed, "heldout")) != heldout[0]


def test_without_ids_the_split_follows_the_text(tmp_path: Path) -> None:
    rows = [{"text": row["text"]} for row in texts(100)]
    one = make(tmp_path / "a", write_lines(tmp_path / "a.jsonl", rows), heldout_fraction=0.3)
    two = make(tmp_path / "b", write_lines(tmp_path / "b.jsonl", rows[::-1]), heldout_fraction=0.3)
    assert sorted(read(one, "heldout").values()) == sorted(read(two, "heldout").values())


@pytest.mark.parametrize("order", [1, -1])
def test_a_text_is_never_in_both_splits(tmp_path: Path, order: int) -> None:
    """By fraction: whichever of the two comes first, the held-out one stays."""
    rows = texts(30)
    rows += [{"id": f"again-{row['id']}", "text": row["text"]} for row in rows]
    corpus = make(tmp_path / "c", write_lines(tmp_path / "a.jsonl", rows[::order]), heldout_fraction=0.5)
    train, heldout = read(corpus), read(corpus, "heldout")
    assert set(train.values()).isdisjoint(heldout.values())
    assert set(train.values()) | set(heldout.values()) == {row["text"] for row in rows}
    left = corpus.card["left_out"]["train_documents_also_held_out"]
    assert left > 0
    assert len(train) + len(heldout) + left == 60


def test_held_out_inputs_win_over_the_others(tmp_path: Path, lines: Path) -> None:
    apart = write_lines(tmp_path / "apart.jsonl", [{"id": "x", "text": ROWS[4]["text"]}, {"id": "y", "text": "new"}])
    corpus = make(tmp_path / "c", lines, heldout=(str(apart),))
    assert set(read(corpus, "heldout")) == {"x", "y"}
    assert set(read(corpus)) == {row["id"] for row in ROWS} - {"doc-4"}
    assert corpus.splits == ("train", "heldout")


def test_strata_take_documents_from_a_length_to_its_double(tmp_path: Path) -> None:
    rows = [{"id": str(n), "text": "x" * n} for n in (5, 8, 15, 16, 31, 32, 100)]
    corpus = make(tmp_path / "c", write_lines(tmp_path / "a.jsonl", rows), strata=(8, 16))
    assert [(d.id, d.stratum, d.length) for d in corpus.documents("train")] == [
        ("8", "8", 9), ("15", "8", 16), ("16", "16", 17), ("31", "16", 32),
    ]  # fmt: skip
    assert [d.id for d in corpus.documents("train", "16")] == ["16", "31"]
    assert corpus.card["left_out"]["outside_strata"] == 3
    counts = corpus.card["splits"]["train"]["strata"]["8"]
    assert (counts["documents"], counts["text_tokens"], counts["lengths"]) == (
        2, 23, {"min": 8, "median": 11.5, "max": 15},
    )  # fmt: skip
    with pytest.raises(ValueError, match="stratum: got '32', expected one of 8, 16"):
        corpus.documents("train", "32")


def test_max_tokens_is_taken_from_each_input(tmp_path: Path) -> None:
    rows = [{"id": f"{i}", "text": "x" * 9} for i in range(50)]
    one, two = (write_lines(tmp_path / f"{name}.jsonl", [*rows, "{", "{"]) for name in "ab")
    corpus = make(tmp_path / "c", one, two, max_tokens=95, shard_tokens=30, max_bad=0)
    assert [source["documents"] for source in corpus.card["sources"]] == [10, 10]
    assert corpus.card["records_read"] == 20


def test_without_an_end_of_text(tmp_path: Path, lines: Path) -> None:
    corpus = make(tmp_path / "c", lines, end_of_text=False)
    assert corpus.end_of_text is None
    assert corpus.documents("train")[0].length == len(ROWS[0]["text"].encode())


def test_the_dtype_follows_the_vocabulary(tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make(tmp_path / "a", lines, dtype="uint32").tokens(open_corpus(tmp_path / "a").document(0)).itemsize == 4
    monkeypatch.setattr("gape.data.tokenizer.ByteTokenizer.vocab_size", 70_000)
    assert make(tmp_path / "b", lines).card["dtype"] == "uint32"
    with pytest.raises(ValueError, match=r"dtype: got uint16, expected one that holds 70,000 ids; it holds 65,536"):
        make(tmp_path / "c", lines, dtype="uint16")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": ("nowhere",)}, "inputs: got 'nowhere', expected a file, a folder"),
        ({"inputs": ("empty",)}, "which has no documents"),
        ({"inputs": ("a.png",)}, r"inputs: got 'a\.png', expected a name that ends in \.txt"),
        ({"inputs": ("books.jsonl", "./books.jsonl")}, "given twice"),
        ({"inputs": ("cut.jsonl.xz",)}, r"cut\.jsonl\.xz cannot be read after line"),
        ({"inputs": ("none.parquet",)}, r"none\.parquet is no Parquet file"),
        ({"inputs": ("noise.jsonl",)}, "none of its first 100 lines is a JSON object"),
        ({"inputs": ("hf:",)}, "inputs: got 'hf:', expected hf:DATASET"),
        ({"text_field": "body"}, r"text_field: got 'body', expected a field that books\.jsonl has: id, title, text"),
        ({"id_field": "key"}, "id_field: got 'key', expected a field"),
        ({"tokenizer": "./nowhere"}, "tokenizer: got './nowhere'"),
        ({"tokenizer": "empty"}, "the folder has none of these files"),
        ({"heldout_fraction": 1.0}, "heldout_fraction: got float 1.0"),
        ({"strata": (8, 8)}, "strata: got"),
        ({"inputs": ()}, "inputs: got"),
        ({"max_bad": -1}, "max_bad: got int -1"),
    ],
)
def test_what_is_wrong_is_named_before_any_work(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch, settings: dict, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.png").touch()
    (tmp_path / "none.parquet").write_text("no")
    (tmp_path / "noise.jsonl").write_text("no\n" * 300)
    (tmp_path / "cut.jsonl.xz").write_bytes(lzma.compress(lines.read_bytes())[:-200])
    if "parquet" in message:
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "c", *settings.pop("inputs", ("books.jsonl",)), **settings)
    assert not (tmp_path / "c").exists()


def test_only_empty_documents_are_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inputs: no documents among the records: 2 read, 2 empty"):
        make(tmp_path / "c", write_lines(tmp_path / "a.jsonl", [{"text": ""}, {"text": " "}]), max_bad=9)
    assert contents(tmp_path / "c") == {}
    make(tmp_path / "c", write_lines(tmp_path / "a.jsonl", [{"text": "Some."}]))


def test_a_directory_is_never_taken_from_something_else(tmp_path: Path, lines: Path) -> None:
    make(tmp_path / "c", lines)
    before = contents(tmp_path / "c")
    with pytest.raises(ValueError, match=r"holds another corpus: heldout_fraction was 0\.0 and is now 0\.1"):
        make(tmp_path / "c", lines, heldout_fraction=0.1)
    write_lines(lines, ROWS[1:])
    with pytest.raises(ValueError, match="holds another corpus: inputs was"):
        make(tmp_path / "c", lines)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="expected a new or empty directory"):
        make(tmp_path / "mine", lines)
    assert contents(tmp_path / "c") == before
