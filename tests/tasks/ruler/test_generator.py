"""Generated samples: of exact length for any tokenizer, findable, the same bytes again, and always an end."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gape.data import Tokenizer, load_tokenizer
from gape.tasks.ruler.builders import Room, TooShortError
from gape.tasks.ruler.generator import Generator, lm_eval_samples
from gape.tasks.ruler.ingredients import Ingredients, Text
from gape.tasks.ruler.sources import sample
from gape.tasks.ruler.tasks import TASKS
from tests.tasks.ruler import small

pytest.importorskip("wonderwords")
LENGTHS = (256, 1024, 4096)
#: Of the slow tests.
LONG = (8192, 32768)
#: A folder with GPT-2's encoder.json and vocab.bpe, which this repository does not hold.
GPT2 = os.environ.get("GAPE_GPT2")


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Ingredients:
    return small.ingredients(tmp_path_factory.mktemp("ingredients"))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    pytest.importorskip("tokenizers")
    sample = {"bytes": load_tokenizer("bytes"), "bpe": small.small_bpe(tmp_path_factory.mktemp("bpe"))}
    return sample | ({"gpt2": load_tokenizer(GPT2)} if GPT2 else {})


def checked(generator: Generator, number: int = 0) -> None:
    """A sample holds what it promises; what does not fit into a short length says so, and fits into 1,024."""
    try:
        sample = generator.sample(number)
    except ValueError as error:
        if generator.length >= 1024 or "does not fit" not in str(error):
            raise
        generator = replace(generator, length=1024)
        sample = generator.sample(number)
    tokens = len(generator.tokenizer.encode(sample["input"] + sample["answer_prefix"])) + sample["budget"]
    assert tokens == sample["length"]
    share = 0.98 if generator.length >= 1024 else 0.90
    assert share * generator.length <= tokens <= generator.length
    own = TASKS[generator.name]
    assert len(generator.tokenizer.encode(" " + own.join(sample["outputs"]))) <= sample["budget"]
    if own.findable:
        assert all(output in sample["input"] for output in sample["outputs"])


@pytest.mark.parametrize("length", [*LENGTHS, *(pytest.param(length, marks=pytest.mark.slow) for length in LONG)])
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("spec", ["bytes", "bpe"])
def test_lengths_are_as_promised_and_answers_are_there(
    spec: str, name: str, length: int, tokenizers: dict[str, Tokenizer], made_of: Ingredients
) -> None:
    checked(Generator(name, length, tokenizers[spec], made_of))


@pytest.mark.slow
@pytest.mark.skipif(GPT2 is None, reason="GAPE_GPT2 names no folder with GPT-2's vocabulary")
@pytest.mark.parametrize("length", LENGTHS + LONG)
@pytest.mark.parametrize("name", TASKS)
def test_with_the_vocabulary_of_gpt2(
    name: str, length: int, tokenizers: dict[str, Tokenizer], made_of: Ingredients
) -> None:
    for number in range(4):
        checked(Generator(name, length, tokenizers["gpt2"], made_of), number)


@pytest.mark.slow
def test_no_thousand_samples_of_4k_take_a_minute(tokenizers: dict[str, Tokenizer], made_of: Ingredients) -> None:
    for name in TASKS:
        Generator(name, 4096, tokenizers["bpe"], made_of).sample(0)
        start = time.process_time()
        list(Generator(name, 4096, tokenizers["bpe"], made_of, seed=1).samples(3))
        assert (time.process_time() - start) / 3 < 0.06, name


#: Of the first sample in JSON, of tasks without words of another package; who changes the wording changes WORDING too.
KNOWN = {
    "niah_multikey_3": "69ee73da57a8cb7a",
    "vt": "0d42967e0988764d",
    "fwe": "4fe33dbd51674e23",
    "qa_1": "072d9307539337e5",
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_same_seed_gives_the_same_bytes(name: str, made_of: Ingredients) -> None:
    sample = Generator(name, 1024, load_tokenizer("bytes"), made_of, seed=7).sample(0)
    assert hashlib.sha256(json.dumps(sample).encode()).hexdigest()[:16] == KNOWN[name]


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_does_not_depend_on_those_before_it(
    name: str, tokenizers: dict[str, Tokenizer], made_of: Ingredients
) -> None:
    one, other = (Generator(name, 1024, tokenizers["bpe"], made_of, seed=3) for _ in range(2))
    assert list(one.samples(3))[2] == other.sample(2)
    assert other.sample(1)["input"] != replace(other, seed=4).sample(1)["input"]


def test_needles_are_asked_for_as_often_as_ruler_does(made_of: Ingredients) -> None:
    counts = {}
    for name in TASKS:
        if name.startswith("niah"):
            sample = Generator(name, 2048, load_tokenizer("bytes"), made_of).sample(0)
            counts[name] = (sample["input"].count("The secret"), len(sample["outputs"]))
    singles = ("niah_single_1", "niah_single_2", "niah_single_3")
    assert {counts[name] for name in singles} == {(1, 1)}
    assert counts["niah_multikey_1"] == (4, 1)
    assert (counts["niah_multivalue"], counts["niah_multiquery"]) == ((4, 4), (4, 4))
    assert min(counts[name][0] for name in ("niah_multikey_2", "niah_multikey_3")) > 8


def test_a_name_that_is_asked_for_has_one_value(made_of: Ingredients) -> None:
    """Also where there are few names, so that others are likely to be drawn again."""
    few = Ingredients()
    few.names = made_of.names._replace(nouns=made_of.names.nouns[:40], adjectives=made_of.names.adjectives[:10])
    for number in range(8):
        sample = Generator("niah_multikey_2", 2048, load_tokenizer("bytes"), few).sample(number)
        name = sample["answer_prefix"].split()[-2]
        assert sample["input"].count(f"The secret number of {name} is") == 1


def test_lines_are_hidden_at_their_depth_in_a_text_without_sentences() -> None:
    text = Text("one two three four " * 50)
    assert text.hide(0, 100, ["HERE"], [0.5]).split().index("HERE") == 50


def test_common_words_are_the_most_common(tokenizers: dict[str, Tokenizer], made_of: Ingredients) -> None:
    sample = Generator("cwe", 8192, tokenizers["bpe"], made_of).sample(1)
    listed = sample["input"].rpartition("than others.")[2]
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert {word for word, _ in counts.most_common(10)} == set(sample["outputs"])
    assert sample["settings"] == {"common": 30, "other": 3, "example": True}


def test_frequent_words_are_in_order(made_of: Ingredients) -> None:
    sample = Generator("fwe", 1024, load_tokenizer("bytes"), made_of).sample(2)
    counts = Counter(re.findall(r"\b[a-z]{6}\b", sample["input"].split("\n\n")[1]))
    ranked = counts.most_common(4)
    assert [word for word, _ in ranked[:3]] == sample["outputs"]
    assert ranked[2][1] > ranked[3][1]


def test_variables_follow_one_another(made_of: Ingredients) -> None:
    sample = Generator("vt", 1024, load_tokenizer("bytes"), made_of).sample(0)
    context = sample["input"].rpartition("Keep track")[2]
    places = [context.index(f"Variable {name} gets") for name in sample["outputs"]]
    assert places == sorted(places)


def test_documents_with_the_answer_are_whole(tokenizers: dict[str, Tokenizer], made_of: Ingredients) -> None:
    sample = Generator("qa_1", 1024, tokenizers["bpe"], made_of).sample(0)
    pool = made_of.questions("squad")
    (question,) = [q for q in pool.items if q.answers == tuple(sample["outputs"])]
    assert pool.documents[question.gold[0]] in sample["input"]


def test_too_few_documents_say_how_far_they_go(tmp_path: Path) -> None:
    few = small.ingredients(tmp_path, documents=9)
    with pytest.raises(ValueError, match=r"length: got int 32768, expected at most about [\d,]+ for qa_1"):
        Generator("qa_1", 32768, load_tokenizer("bytes"), few).sample(0)


def test_what_a_tokenizer_puts_before_a_text_is_counted(made_of: Ingredients) -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.before = 200
    sample = Generator("vt", 4096, tokenizer, made_of).sample(0)
    tokens = 200 + len(tokenizer.encode(sample["input"] + sample["answer_prefix"])) + sample["budget"]
    assert tokens == sample["length"]
    assert 0.98 * 4096 <= tokens <= 4096


class Empty:
    """A tokenizer without its files, which makes nothing of everything."""

    vocab_size, end_of_text, before = 1, None, 0

    def encode(self, text: str) -> list[int]:
        return []


def test_what_cannot_work_is_refused(made_of: Ingredients) -> None:
    tokenizer = load_tokenizer("bytes")
    with pytest.raises(ValueError, match="length: got int 255, expected a whole number of at least 256"):
        Generator("vt", 255, tokenizer, made_of)
    with pytest.raises(ValueError, match="task: got 'niah', expected one of niah_single_1"):
        Generator("niah", 1024, tokenizer, made_of)
    with pytest.raises(ValueError, match="makes no tokens of a text"):
        Generator("vt", 1024, Empty(), made_of)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="squad: got no file"):
        Generator("qa_1", 1024, tokenizer, Ingredients()).sample(0)


def test_a_broken_file_of_questions_is_named(tmp_path: Path) -> None:
    path = tmp_path / "squad.json"
    path.write_text('{"data": [{"paragraphs": [{"qas": []}]}]}')
    with pytest.raises(ValueError, match=r"squad: .*squad\.json is no squad file.*KeyError 'context'"):
        Ingredients(questions={"squad": path}).questions("squad")


@pytest.mark.parametrize("cost", [1, 7, 40])
def test_a_search_ends_below_the_room(cost: int) -> None:
    """Also where a unit costs more, the further in it is."""
    counted = 0

    def render(count: int) -> str:
        nonlocal counted
        counted += 1
        return "x" * (20 + cost * count + count * count // 50)

    room = Room(load_tokenizer("bytes"), 5000, 4, slack=0)
    sample = room.fill(render, most=10**6)
    assert len(render(sample)) <= 5000 < len(render(sample + 1))
    assert counted < 48
    with pytest.raises(TooShortError):
        Room(load_tokenizer("bytes"), 19, 4, slack=0).fill(render, most=10)


def test_the_wording_of_lm_eval_has_a_shortest_length_of_its_own() -> None:
    with pytest.raises(ValueError, match="length: got int 2048"):
        lm_eval_samples("vt", 2048, "bytes", 1)


@pytest.mark.slow
def test_rulers_own_wording_from_lm_eval(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    folder = small.random_gpt2(tmp_path)
    drawn = lm_eval_samples("fwe", 4096, str(folder), 2, seed=0)
    assert len(drawn) == 2
    actual = sample(drawn[0], place="here", source="s", number=1)
    assert (actual.task, actual.length, actual.budget) == ("fwe", 4096, 50)
    assert actual.prefix.startswith(" Answer:")
    assert all(output in actual.input for output in actual.outputs)
    with pytest.raises(ValueError, match="length: got int 1024, expected at least 4096 for the wording of lm-eval"):
        lm_eval_samples("fwe", 1024, str(folder), 2)
    with pytest.raises(ValueError, match="cwe: lm-eval cannot make it"):
        lm_eval_samples("cwe", 4096, "nowhere/at-all", 2)
