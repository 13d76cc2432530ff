"""Samples from files: the fields that public files have, and every mistake named with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gape.tasks.ruler import tasks
from gape.tasks.ruler.sources import read, sample
from gape.tasks.ruler.tasks import TASKS, task
from tests.tasks.ruler import small


def of(**fields: object) -> object:
    return sample({"task": "vt", "max_seq_length": 512} | fields, place="here", source="s", number=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "Text. Q?", "outputs": ["a", "b"], "answer_prefix": " They are"},
        {"input": "Text. Q?", "outputs": ["a", "b"], "gen_prefix": "They are"},
        {"prompt": "Text. Q?", "answers": ["a", "b"], "answer_prefix": " They are"},
        {"context": "Text. ", "question": "Q?", "answer": ["a", "b"], "answer_prefix": "They are"},
        {"input": "Text. ", "question": "Q?", "outputs": ["a", "b"], "answer_start": " They are"},
    ],
)
def test_fields_as_public_files_have_them(fields: dict[str, object]) -> None:
    actual = of(**fields)
    assert actual.input + actual.prefix == "Text. Q? They are"
    assert (actual.outputs, actual.answer) == (("a", "b"), "a b")
    assert (actual.task, actual.length, actual.budget) == ("vt", 512, 30)


def test_what_a_source_says_of_budgets_counts() -> None:
    assert of(input="T", output="a", max_new_tokens=7).budget == 7


@pytest.mark.parametrize(
    ("name", "task_name", "length"),
    [
        ("cwe_4k.jsonl", "cwe", 4096),
        ("8192_niah_multikey_1.jsonl", "niah_multikey_1", 8192),
        ("some-niah_single_1-16k.jsonl", "niah_single_1", 16384),
        ("ruler_qa_hotpot.jsonl", "qa_2", 256),
        ("qa_1/validation.jsonl", "qa_1", 256),
    ],
)
def test_names_say_task_and_length(name: str, task_name: str, length: int, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    lines = [{"index": 0, "input": "T", "outputs": ["a"], "length": 201, "others": {}, "truncation": -1, "pred": "x"}]
    (actual,), (source,) = read([str(small.write_samples(path, *lines))])
    assert (actual.task, actual.length, actual.prefix) == (task_name, length, "")
    assert (source.name, source.samples) == (path.name, 1)


def test_folders_and_packed_files(tmp_path: Path) -> None:
    small.write_samples(tmp_path / "vt_256.jsonl", small.record(0), small.record(1))
    with gzip.open(tmp_path / "cwe.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(small.record(2, task="cwe")) + "\n\n")
    samples, sources = read([str(tmp_path)])
    assert [(s.task, s.source, s.number) for s in samples] == [
        ("cwe", "cwe.jsonl.gz", 1),
        ("vt", "vt_256.jsonl", 1),
        ("vt", "vt_256.jsonl", 2),
    ]
    assert [s.samples for s in sources] == [1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"vt\.jsonl: line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"outputs": ["a"], "length": 9}', "line 2 has no text in input, prompt or context"),
        ('{"input": " ", "outputs": ["a"], "length": 9}', "line 2 has no text in"),
        ('{"input": "T\\ud800", "outputs": ["a"], "length": 9}', "line 2 has half a character"),
        ('{"input": "T", "length": 9}', "line 2 has none of the fields outputs, output, answers, answer"),
        ('{"input": "T", "outputs": [], "length": 9}', r"line 2 has outputs \[\], expected one or more texts"),
        ('{"input": "T", "outputs": [""], "length": 9}', r"line 2 has outputs \[''\], expected one or more"),
        ('{"input": "T", "outputs": [3], "length": 9}', r"line 2 has outputs \[3\], expected"),
        ('{"input": "T", "outputs": ["a"], "length": 9, "task": "maze"}', "line 2 is of task 'maze', which is none"),
        ('{"input": "T", "outputs": ["a"]}', "line 2 says no length, and neither does its file; call it TASK_LENGTH"),
    ],
)
def test_a_line_that_is_no_sample_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "vt.jsonl"
    path.write_text(json.dumps(small.record()) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read([str(path)])


def test_a_file_that_names_no_task_is_refused(tmp_path: Path) -> None:
    path = small.write_samples(tmp_path / "samples.jsonl", {"input": "T", "outputs": ["a"]})
    with pytest.raises(ValueError, match=r"names no task, and neither does its file; call it TASK_LENGTH\.jsonl"):
        read([str(path)])


def test_nothing_and_twice_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vt.jsonl").touch()
    with pytest.raises(ValueError, match="has no samples"):
        read([str(tmp_path / "vt.jsonl")])
    with pytest.raises(ValueError, match="data: got 'nowhere', expected a file of JSON lines"):
        read(["nowhere"])
    path = str(small.write_samples(tmp_path / "cwe.jsonl", small.record()))
    with pytest.raises(ValueError, match=r"two sources are called cwe\.jsonl"):
        read([path, path])


@pytest.mark.parametrize(
    ("output", "references", "match", "score"),
    [
        (" 12 and 34.", ["12", "34"], "all", 1.0),
        ("only 34", ["12", "34", "56", "78"], "all", 0.25),
        ("PARIS, of course", ["paris"], "part", 1.0),
        ("in Paris", ["London", "Paris", "Rome"], "part", 1.0),
        ("nowhere", ["London", "Paris"], "part", 0.0),
        ("a\x00b", ["a\nb"], "all", 1.0),
        ("", ["a"], "all", 0.0),
        ("1234567", ["3456"], "all", 1.0),
    ],
)
def test_string_match_as_ruler_defines_it(output: str, references: list[str], match: str, score: float) -> None:
    """Parts of words count, case does not; control characters are line breaks."""
    assert tasks.score(output, references, match) == score


def test_tasks_are_matched_as_ruler_matches_them() -> None:
    assert {name for name, one in TASKS.items() if one.match == "part"} == {"qa_1", "qa_2"}
    assert task("cwe").join(["a", "b"]) == "1. a 2. b"
    assert task("qa_1").join(["Paris", "paris, France"]) == "Paris"
    assert task("niah_multivalue").join(["1", "2"]) == "1, 2"


def test_scores_are_those_of_lm_eval() -> None:
    common = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    references = ["alpha", "Beta", "gamma"]
    for output in ("alpha beta", "GAMMA\x07alpha", "none"):
        theirs = common.string_match_all(common.postprocess_pred([output]), [references])
        assert tasks.score(output, references, "all") == theirs
