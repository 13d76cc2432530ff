"""Samples scored and kept: the same rows after any interruption, and records that models are compared by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gape.data import load_tokenizer
from gape.tasks.ruler import evaluation
from gape.tasks.ruler.evaluation import SAMPLES, Prepared, Settings
from gape.tasks.ruler.readers import GPTReader
from gape.tasks.ruler.sources import Source, read
from tests.tasks import text
from tests.tasks.ruler import small

SETTINGS = Settings(batch_tokens=300)
SOURCES = [Source("vt.jsonl", "0", 7)]


@pytest.fixture
def reader() -> GPTReader:
    return GPTReader(text.gpt(), load_tokenizer("bytes"))


@pytest.fixture
def items(tmp_path: Path, reader: GPTReader) -> list[Prepared]:
    records = [small.record(n, task="qa_2" if n > 4 else "vt") for n in range(7)]
    samples, _ = read([str(small.write_samples(tmp_path / "mixed.jsonl", *records))])
    return evaluation.prepare(reader, samples)


def score(reader: GPTReader, items: list[Prepared], home: Path, **more: object) -> list[dict[str, object]]:
    question = evaluation.question({"weights": "w"}, SOURCES, SETTINGS)
    return evaluation.evaluate(reader, items, SETTINGS, home, question=question, **more)  # type: ignore[arg-type]


def test_rows_say_everything(reader: GPTReader, items: list[Prepared], tmp_path: Path) -> None:
    rows = score(reader, items, tmp_path / "out")
    assert [row["sample"] for row in rows] == list(range(7))
    first = rows[0]
    assert first["references"] == ["N0A", "BB"]
    assert (first["answer"], first["answer_tokens"]) == ("N0A BB", 7)
    assert first["nll"] == pytest.approx(reader.losses([items[0].prompt], [items[0].answer])[0].mean(), abs=1e-9)
    assert len(first["output"].encode()) >= 1
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["question"]["settings"]["template"] == "base"
    assert manifest["question"]["data"] == [{"name": "vt.jsonl", "sha256": "0", "samples": 7}]
    assert {"versions", "machine", "prompts_sha256"} <= manifest.keys()


def test_samples_of_another_budget_are_read_apart(reader: GPTReader, tmp_path: Path) -> None:
    """Each has room for its own budget, but not for that of another."""
    records = [small.record(n, budget=6 + n) for n in range(2)]
    samples, _ = read([str(small.write_samples(tmp_path / "vt.jsonl", *records))])
    assert len(evaluation.batches(evaluation.prepare(reader, samples), 10**6)) == 2


def test_batches_hold_one_task_and_no_more_tokens_than_the_limit(items: list[Prepared]) -> None:
    batches = evaluation.batches(items, 300)
    assert sorted(n for batch in batches for n in batch) == list(range(7))
    assert max(len(batch) for batch in batches) > 1
    for batch in batches:
        assert len({items[n].sample.task for n in batch}) == 1
        longest = max(len(items[n].prompt) for n in batch)
        assert len(batch) == 1 or longest * len(batch) <= 300


@pytest.mark.parametrize("share", [0, 0.2, 0.5, 0.81, 1])
def test_a_file_cut_anywhere_is_completed_to_the_same_rows(
    share: float, reader: GPTReader, items: list[Prepared], tmp_path: Path
) -> None:
    home = tmp_path / "out"
    whole = score(reader, items, home)
    data = (home / SAMPLES).read_bytes()
    (home / SAMPLES).write_bytes(data[: int(len(data) * share)])
    assert score(reader, items, home) == whole
    assert sorted((home / SAMPLES).read_bytes().splitlines()) == sorted(data.splitlines())


def test_what_is_done_is_not_done_again(reader: GPTReader, items: list[Prepared], tmp_path: Path) -> None:
    score(reader, items, tmp_path / "out")
    reader.losses = lambda prompts, answers: pytest.fail("read again")  # type: ignore[method-assign]
    assert len(score(reader, items, tmp_path / "out")) == 7


def test_a_stop_keeps_what_was_scored(reader: GPTReader, items: list[Prepared], tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(reader, items, tmp_path / "out", progress=interrupt)
    done = len((tmp_path / "out" / SAMPLES).read_text().splitlines())
    assert 0 < done < 7


def test_another_question_is_refused(reader: GPTReader, items: list[Prepared], tmp_path: Path) -> None:
    score(reader, items, tmp_path / "out")
    question = evaluation.question({"weights": "other"}, SOURCES, SETTINGS)
    with pytest.raises(ValueError, match=r"out: got .* expected a directory of the same evaluation"):
        evaluation.evaluate(reader, items, SETTINGS, tmp_path / "out", question=question)


def test_a_broken_line_of_scored_samples_is_named(reader: GPTReader, items: list[Prepared], tmp_path: Path) -> None:
    score(reader, items, tmp_path / "out")
    path = tmp_path / "out" / SAMPLES
    path.write_bytes(b"\0\0\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"samples\.jsonl: line 1 "):
        score(reader, items, tmp_path / "out")


def test_a_plan_is_of_what_was_read(reader: GPTReader, items: list[Prepared], tmp_path: Path) -> None:
    """Another tokenizer's losses per token are of something else."""
    rows = score(reader, items[:2], tmp_path / "out")
    changed = ([rows[0] | more, rows[1]] for more in ({}, {"answer_tokens": 2}))
    assert len({evaluation.summarise(rows)[0]["plan"] for rows in changed}) == 2


def test_a_loss_that_is_no_number_is_named(reader: GPTReader, items: list[Prepared], tmp_path: Path) -> None:
    reader.model.embedding.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"loss: got nan for mixed\.jsonl sample"):
        score(reader, items, tmp_path / "out")


def test_summaries_count_and_average(reader: GPTReader, tmp_path: Path) -> None:
    samples, _ = read([str(small.write_samples(tmp_path / "vt.jsonl", *(small.record(n) for n in range(5))))])
    rows = score(reader, evaluation.prepare(reader, samples), tmp_path / "out")
    (row,) = evaluation.summarise(rows)
    losses = [row["nll"] for row in rows]
    assert row["samples"] == 5
    assert row["nll"] == pytest.approx(sum(losses) / 5)
    assert row["nll_low"] <= row["nll"] <= row["nll_high"]
    assert row["sample_nll"] == [round(value, 5) for value in losses]
    assert 0 <= row["match"] <= 1
