"""Looks into language models: the passages they are read on, what is found, and how it is kept."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from gape.analysis import attended, lm, statistics
from gape.analysis.passages import Passage, Reader
from tests.tasks import text


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text.corpus(tmp_path_factory.mktemp("books"), lengths=(80, 90, 30)).directory


def test_documents_are_cut_to_the_length_and_chosen_by_the_seed(corpus: Path) -> None:
    reader = Reader(corpus)
    actual = reader.passages(64, 10)
    assert [len(passage.ids) for passage in actual.items] == [64, 64]
    (one,) = reader.passages(64, 1).items
    assert (one.id, one.ids.tolist()) == (actual.items[0].id, actual.items[0].ids.tolist())
    document = next(d for d in reader.corpus.documents("heldout") if d.id == one.id.partition("@")[0])
    start = int(one.id.partition("@")[2])
    assert reader.corpus.tokens(document, start, start + 64).tolist() == one.ids.tolist()


def test_a_length_beyond_every_document_is_refused(corpus: Path) -> None:
    with pytest.raises(ValueError, match="length: got int 100, expected at most 90 tokens"):
        Reader(corpus).passages(100, 1)


def test_prompts_are_read_whole_with_their_answer_prefix(tmp_path: Path) -> None:
    rows = [
        {"input": "Where? ", "answer_prefix": "It is"},
        {"prompt": "abc"},
        {"text": ""},
    ]
    path = tmp_path / "ruler.jsonl.xz"
    path.write_bytes(lzma.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    reader = Reader(path, tokenizer="bytes")
    actual = reader.passages(None, 10)
    assert sorted(bytes(p.ids.tolist()).decode() for p in actual.items) == ["Where? It is", "abc"]
    assert actual.length is None
    with pytest.raises(ValueError, match="prompts"):
        reader.passages(8, 1)


def test_a_text_is_cut_into_windows_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    path.write_text("abcdefghij", encoding="utf-8")
    actual = Reader(path, tokenizer="bytes").passages(4, 5)
    assert [bytes(p.ids.tolist()).decode() for p in actual.items] == ["abcd", "efgh"]
    with pytest.raises(ValueError, match="at most the 10 tokens"):
        Reader(path, tokenizer="bytes").passages(11, 1)


@pytest.mark.parametrize(
    ("name", "content", "tokenizer", "message"),
    [
        ("x.txt", None, "bytes", "expected a corpus, a text file"),
        ("x.txt", "abc", None, "tokenizer: got nothing"),
        ("x.jsonl", '{"question": "?"}\n', "bytes", "line 1 has none of the fields input, prompt, text"),
        ("x.jsonl", "{\n", "bytes", "line 1 is not JSON"),
    ],
)
def test_data_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: str | None, tokenizer: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        Reader(tmp_path / name, tokenizer=tokenizer).passages(None, 1)


def passages(count: int = 2, n: int = 50) -> list[Passage]:
    random = np.random.default_rng(0)
    return [Passage(str(at), random.integers(text.VOCAB, size=n)) for at in range(count)]


def test_entropy_and_gates_are_means_by_sample_layer_and_head() -> None:
    gpt, chosen = text.gpt("p-rope+gape", torch.float32), passages()
    actual = lm.entropy(gpt, chosen)
    assert json.loads(json.dumps(actual)) == actual
    record = attended(gpt, torch.from_numpy(chosen[1].ids)[None])[1]
    expected = statistics(record)
    np.testing.assert_allclose(actual["entropy"][1][1], expected.entropy[0].mean(-1), atol=1e-5)
    np.testing.assert_allclose(actual["gate"][1][1], record.gate[0].mean(-1), rtol=1e-5)
    g, h = record.gate[0, 0, 1:], expected.entropy[0, 0, 1:] / torch.arange(2, 51).log()
    assert actual["correlation"][1][1][0] == pytest.approx(float(np.corrcoef(g, h)[0, 1]), abs=1e-3)
    assert np.array(actual["used"]).shape == (2, 2, 2, 3)


def test_a_scheme_without_gates_has_none_to_show() -> None:
    actual = lm.entropy(text.gpt("fox", torch.float32), passages(1))
    assert {name for name, value in actual.items() if value is None} == {
        "effective", "gate", "landmark", "mask", "correlation", "amplitude",
    }  # fmt: skip


def test_pictures_are_of_the_given_layer() -> None:
    gpt, (passage, _) = text.gpt("p-rope+gape", torch.float32), passages()
    maps, masks = (analyse(gpt, passage, layer=1, size=5) for analyse in (lm.maps, lm.masks))
    assert np.array(maps["weights"]).shape == (2, 5, 5)
    np.testing.assert_allclose(np.array(maps["weights"]).sum(-1), 1, atol=0.01)
    assert np.array(masks["masks"][0])[0, 1:].tolist() == [None] * 4
    with pytest.raises(ValueError, match="layer: got int 2, expected a number from 0 to 1"):
        lm.maps(gpt, passage, layer=2)


def test_a_spectrum_has_an_entry_per_pair() -> None:
    actual = lm.spectrum(text.gpt("p-rope+gape", torch.float32), passages())
    pairs = len(actual["inv_freq"])
    assert np.array(actual["queries"]["mean"]).shape == np.array(actual["keys"]["std"]).shape == (2, 2, pairs)
