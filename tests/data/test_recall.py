"""Recall texts: exact lengths, answers that their facts give, nothing of RULER, the same for whoever asks."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from gape.data import Corpus, RecallConfig, RecallSource, WindowSource, load_tokenizer
from gape.data.recall_texts import FORMS, NAMES, RecallWriter, Request
from gape.data.tokenizer import ByteTokenizer, Tokenizer
from gape.tasks.ruler.builders import BUILDERS, Room
from gape.tasks.ruler.ingredients import Ingredients
from gape.tasks.ruler.tasks import TASKS
from gape.train import Source
from tests.data.books import make, write_lines
from tests.wrong import each_wrong

LENGTH = 1024
STORY = "The rain had stopped. Nobody spoke for a while! Then the old man laughed, and they walked on. "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    home = tmp_path_factory.mktemp("corpus")
    rows = [{"id": f"d{i}", "text": f"Chapter {i}. " + STORY * 60} for i in range(8)]
    return make(home / "c", write_lines(home / "a.jsonl", rows), heldout_fraction=0.2)


def word_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer of whole words and single letters, which joins spaces to words as GPT-2's does."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["</s>"])
    inner.train_from_iterator([STORY, *(form.fact for form in FORMS)], trainer)
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def source(corpus: Corpus, config: RecallConfig, **options: object) -> RecallSource:
    windows = WindowSource(corpus, length=LENGTH, batch_size=4, accumulation=2, seed=3)
    return RecallSource(windows, ByteTokenizer(), config, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_texts_have_the_length_of_their_passage_and_answers_are_those_of_the_facts(kind: str, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else word_tokenizer(tmp_path)
    writer, seen = RecallWriter(tokenizer), set()
    passage = np.array(tokenizer.encode(STORY * 60))[:LENGTH]
    for number in range(80):
        text = writer.write(passage, Random(number))
        assert text is not None
        assert len(text.ids) == LENGTH
        for answer, fact in zip(text.answers, text.sources, strict=True):
            value, stated = (tokenizer.decode(text.ids[r.start : r.stop].tolist()) for r in (answer, fact))
            assert value == stated != ""
            assert fact.stop <= answer.start
        seen.add(len(text.answers))
    assert {1, 2, 3} <= seen <= set(range(1, 9))


def test_a_text_has_at_least_as_many_facts_as_wanted_and_asks_for_one_up_to_all() -> None:
    request = Request(facts=64, least=4)
    counts = [request.draw_count(Random(number)) for number in range(400)]
    assert min(counts) == 4
    assert 48 < max(counts) <= 64
    # The logarithm is spread evenly: half of the texts have fewer than the geometric mean.
    assert 0.4 < sum(count < 16 for count in counts) / len(counts) < 0.6
    assert {request.draw_asked(Random(number), 3) for number in range(40)} == {1, 2, 3}


def test_facts_stand_at_the_depths_that_are_given_and_between_sentences() -> None:
    tokenizer = ByteTokenizer()
    passage = np.array(tokenizer.encode(STORY * 40))[:LENGTH]
    for number in range(20):
        text = RecallWriter(tokenizer).write(passage, Random(number), Request(facts=1, depths=(0.6, 0.8), repeated=0))
        assert text is not None
        (fact,) = text.sources
        assert 0.25 < fact.start / LENGTH < 0.85
        before = tokenizer.decode(text.ids[: fact.start].tolist())
        # The sentence of the fact begins behind the end of another.
        assert re.search(r"[.!] [^.!]*$", before)


def test_names_of_held_out_texts_are_in_no_other() -> None:
    tokenizer = ByteTokenizer()
    passage = np.array(tokenizer.encode(STORY * 40))[:LENGTH]
    pattern = re.compile(rf"\b(?:{'|'.join(NAMES['person'][0])}) [A-Z]\w+")
    names = []
    for heldout in (False, True):
        writer = RecallWriter(tokenizer, heldout=heldout)
        texts = [writer.write(passage, Random(n)) for n in range(80)]
        names.append({name for text in texts if text for name in pattern.findall(tokenizer.decode(text.ids.tolist()))})
    assert names[0]
    assert names[1]
    assert not names[0] & names[1]


#: Words without which no sentence can be.
COMMON = """a all an and are as at be by did do does every for from has have how in is it many must of on one that the
to under was what when which who whoever with"""
#: RULER's own needles and questions.
RULER = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards. One of the special magic uuids for is: What are all the special magic words for mentioned "
    "in the provided text? The special magic number for mentioned in the provided text are"
)


def test_nothing_is_said_in_the_words_or_with_the_keys_of_ruler() -> None:
    ingredients, asked = Ingredients(), set[str]()
    for task in TASKS.values():
        if task.family in ("needles", "variables"):
            room = Room(ByteTokenizer(), 700, 10, 10)
            draft = BUILDERS[task.family](task, Random(0), lambda answer, room=room: room, ingredients)
            asked |= _words(draft.input + draft.prefix) - _words(ingredients.noise.passage(0, 200))
    keys = {word.lower() for word in (*ingredients.names.nouns, *ingredients.names.adjectives)}
    ours = _words([text for form in FORMS for text in form[2:]]) - _words(COMMON)
    assert "secret" in asked
    assert not ours & (asked - _words(COMMON))
    assert not ours & (_words(RULER) - _words(COMMON))
    names = {word.lower() for first, second, _ in NAMES.values() for word in (*first, *second)}
    whole = {f"{a}{b}".lower() for a, b in ((a, b) for a in NAMES["town"][0] for b in NAMES["town"][1])}
    parts = {word.lower() for word in (*NAMES["town"][0], *NAMES["town"][1])}
    assert not (names - parts | whole) & keys


def _words(texts: str | list[str]) -> set[str]:
    joined = texts if isinstance(texts, str) else " ".join(texts)
    return set(re.findall(r"[a-z]+", joined.lower()))


def test_a_share_of_windows_become_recall_texts_whose_answers_weigh_more(corpus: Corpus) -> None:
    mixed = source(corpus, RecallConfig(share=0.5, weight=4.0))
    assert isinstance(mixed, Source)
    recall = total = 0
    for step in range(1, 6):
        for micro in range(2):
            batch, plain = mixed.batch(step, micro), mixed.inner.batch(step, micro)
            assert batch.weights is not None
            assert torch.equal(batch.ids[:, 1:], batch.targets[:, :-1])
            for row in range(4):
                weights, total = batch.weights[row], total + 1
                if torch.equal(batch.ids[row], plain.ids[row]):
                    assert bool((weights == 1).all())
                    continue
                recall += 1
                heavy = batch.targets[row][weights == 4].tolist()
                # Values of answers, each with what ends it.
                assert 2 <= len(heavy) < LENGTH / 4
                assert bytes(heavy).endswith(b".")
    assert 0.3 < recall / total < 0.7


def test_batches_are_functions_of_seed_and_step(corpus: Corpus) -> None:
    config = RecallConfig(share=0.5, skip_to=5000)
    first, again = (source(corpus, config).batch(7, 1) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    other = RecallSource(
        WindowSource(corpus, length=LENGTH, batch_size=4, accumulation=2, seed=4), ByteTokenizer(), config
    )
    assert not torch.equal(first.ids, other.batch(7, 1).ids)
    assert source(corpus, config).fingerprint() != source(corpus, RecallConfig(share=0.4, skip_to=5000)).fingerprint()


def test_positions_jump_once_and_reach_no_further_than_they_may(corpus: Corpus) -> None:
    batches = [source(corpus, RecallConfig(skip_to=5000, skip_share=0.5)).batch(step, 0) for step in range(1, 11)]
    assert all(batch.weights is None for batch in batches)
    steps = torch.cat([batch.positions.diff(dim=-1) for batch in batches])  # type: ignore[union-attr]
    last = torch.cat([batch.positions[:, -1] for batch in batches])  # type: ignore[index]
    jumps = (steps > 1).sum(-1)
    assert bool((steps >= 1).all())
    assert int(jumps.max()) == 1
    assert 0.25 < jumps.float().mean() < 0.75
    assert int(last.max()) < 5000
    assert int(last.max()) > 3000


def test_kept_texts_fill_their_share(corpus: Corpus) -> None:
    mixed = source(corpus, RecallConfig(share=0.25), kept=[[1, 2, 3], [4, 5]], kept_share=0.5)
    rows = torch.cat([mixed.batch(step, 0).ids for step in range(1, 11)])
    kept = (rows < 6).all(-1)
    assert 0.25 < kept.float().mean() < 0.75


@each_wrong(share=(1.5,), weight=(0,), facts=(129,), least=(9,), skip_to=(-1,))
def test_values_out_of_range_are_refused(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        RecallConfig(**{argument: value})  # type: ignore[arg-type]


def test_windows_too_short_for_a_fact_or_a_jump_are_refused(corpus: Corpus) -> None:
    short = WindowSource(corpus, length=64, batch_size=4)
    with pytest.raises(ValueError, match=r"^length: "):
        RecallSource(short, ByteTokenizer(), RecallConfig(share=0.1))
    with pytest.raises(ValueError, match=r"^skip_to: "):
        RecallSource(short, ByteTokenizer(), RecallConfig(skip_to=63))
