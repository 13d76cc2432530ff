"""Recall by distance: facts stand where they should, and a model that copies is told from one that does not."""

from __future__ import annotations

import pytest
import torch

from gape.data import Corpus
from gape.data.tokenizer import ByteTokenizer
from gape.tasks import recall
from tests.data.books import make, write_lines
from tests.tasks.text import gpt

LENGTH = 900
STORY = "The rain had stopped. Nobody spoke for a while! Then the old man laughed, and they walked on. "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    home = tmp_path_factory.mktemp("corpus")
    rows = [{"id": f"d{i}", "text": f"Chapter {i}. " + STORY * 20} for i in range(8)]
    return make(home / "c", write_lines(home / "a.jsonl", rows), heldout_fraction=0.3)


def test_facts_stand_at_their_distance_and_texts_end_with_the_answer(corpus: Corpus) -> None:
    samples = list(recall.samples(corpus, ByteTokenizer(), LENGTH, 5))
    assert [sample.distance for sample in samples] == ["far", "middle", "near"] * 5
    for sample in samples:
        low, high = recall.DISTANCES[sample.distance]
        assert low - 0.15 < sample.source.start / LENGTH < high
        value = sample.ids[sample.source.start : sample.source.stop]
        assert torch.equal(sample.ids[-sample.answer :], value)
        assert LENGTH - 2 <= len(sample.ids) <= LENGTH
    again = list(recall.samples(corpus, ByteTokenizer(), LENGTH, 5))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(samples, again, strict=True))


def test_scores_are_those_of_the_answers_tokens(corpus: Corpus) -> None:
    model, sample = gpt(), next(iter(recall.samples(corpus, ByteTokenizer(), LENGTH, 1)))
    score = recall.score(model, sample.ids, sample.answer)
    with torch.no_grad():
        logits = model(sample.ids[None, :-1]).logits[0, -sample.answer :]
    expected = torch.nn.functional.cross_entropy(logits, sample.ids[-sample.answer :])
    assert score.nll == pytest.approx(float(expected))
    assert not score.right
    # A text whose last tokens are those that the model expects.
    ids = sample.ids[:-1]
    likeliest = model(ids[None]).logits[0, -1:].argmax(-1)
    assert recall.score(model, torch.cat([ids, likeliest]), 1).right


def test_documents_that_are_too_short_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"^length: "):
        list(recall.samples(corpus, ByteTokenizer(), 10**6, 1))
    with pytest.raises(ValueError, match=r"^length: "):
        list(recall.samples(corpus, ByteTokenizer(), 100, 1))


def test_every_text_asks_for_all_of_its_facts(corpus: Corpus) -> None:
    texts = recall.several(corpus, ByteTokenizer(), 1200, 20, 4)
    assert [len(answers) for _, answers in texts] == [4] * 20
    with pytest.raises(ValueError, match=r"^facts: "):
        list(recall.several(corpus, ByteTokenizer(), LENGTH, 1, 64))
