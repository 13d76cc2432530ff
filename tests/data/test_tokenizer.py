"""Tokenizers: bytes, GPT-2's files and tokenizer.json, all the same vocabulary in the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gape.data import load_tokenizer
from tests.data.books import make, read, texts, write_lines

TEXT = "Words, wordier 123 words\n\n  and é, <|endoftext|> too."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 tokens as GPT-2's files."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    home = tmp_path_factory.mktemp("tiny")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    inner.train_from_iterator([row["text"] for row in texts(50)] + [TEXT] * 9, trainer)
    inner.model.save(str(home))
    inner.save(str(home / "tokenizer.json"))
    return home


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("hé") == [104, 195, 169]
    assert tokenizer.decode([*tokenizer.encode(TEXT), 256]) == TEXT
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)


def test_the_files_of_gpt2_under_either_name(folder: Path, tmp_path: Path) -> None:
    one = load_tokenizer(folder)
    for old, new in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        (tmp_path / new).write_bytes((folder / old).read_bytes())
    two = load_tokenizer(tmp_path)
    assert one.encode(TEXT) == two.encode(TEXT)
    assert one.identity()["sha256"] == two.identity()["sha256"]
    assert one.identity()["kind"] == "gpt2-files"


def test_the_name_of_a_special_token_is_text(folder: Path) -> None:
    for spec in (folder, folder / "tokenizer.json"):
        tokenizer = load_tokenizer(spec)
        assert tokenizer.end_of_text == 0
        assert 0 not in tokenizer.encode(TEXT)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        assert tokenizer.vocab_size == 300


def test_the_end_of_text_is_what_the_settings_say(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end_of_text == tokenizer.encode("!")[0]


def test_what_comes_before_a_text_is_known(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    name = inner.id_to_token(0)
    inner.post_processor = TemplateProcessing(single=f"{name} $A {name}", special_tokens=[(name, 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").before == 1
    assert load_tokenizer(folder).before == load_tokenizer("bytes").before == 0


def test_a_corpus_of_it_in_processes(folder: Path, tmp_path: Path) -> None:
    rows = texts(30)
    lines = write_lines(tmp_path / "a.jsonl", rows)
    corpus = make(tmp_path / "c", lines, tokenizer=str(folder))
    tokenizer = load_tokenizer(folder)
    for document, row in zip(corpus.documents("train"), rows, strict=True):
        ids = corpus.tokens(document).tolist()
        assert ids[-1] == tokenizer.end_of_text
        assert tokenizer.decode(ids[:-1]) == row["text"]
    assert corpus.tokenizer == tokenizer.identity()
    other = make(tmp_path / "bytes", lines)
    assert other.tokenizer["sha256"] != corpus.tokenizer["sha256"]
    assert read(other) == {row["id"]: row["text"] for row in rows}


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match="the folder has none of these files"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("no merges here at all")
    with pytest.raises(ValueError, match="are no GPT-2 vocabulary"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
