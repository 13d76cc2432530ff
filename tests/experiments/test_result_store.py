"""Results in a run's directory: what is missing, what is added, what replaces what; and whose tokens a model takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gape.experiments.open_model import OpenModel
from gape.experiments.result_store import ResultSets, ResultStore
from gape.utils.jsonl import read_object
from tests.tasks import text

RUN = {"run": "a", "variant": "", "position": "rope", "seed": 0, "train_length": 16, "step": 5}


def test_what_has_a_row_is_not_missing(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "rows.jsonl")
    selection = [{"length": length, "device": "cpu"} for length in (8, 16)]
    assert store.missing(selection) == selection
    store.append({"length": 8, "device": "cuda"}, {"length": 16, "device": "cpu", "nll": 1.0})
    assert store.missing(selection) == selection[:1]


def test_of_rows_of_one_key_the_last_counts(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "rows.jsonl", key=("stratum",))
    store.append({"stratum": "a", "nll": 1.0}, {"stratum": "b", "nll": 2.0}, {"stratum": "a", "nll": 3.0})
    assert [row["nll"] for row in store.rows()] == [3.0, 2.0]
    assert store.missing([{"nll": 1.0}, {"nll": 4.0}]) == [{"nll": 4.0}]
    assert store.rows({"nll": 1.0}) == [{"stratum": "a", "nll": 1.0}]


def test_a_row_that_was_cut_short_is_replaced(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "rows.jsonl")
    store.append({"step": 1})
    with store.path.open("a") as file:
        file.write('{"step": ')
    assert store.rows() == [{"step": 1}]
    store.append({"step": 2})
    store.replace([{"step": 3}], keep=lambda row: row["step"] > 1)
    assert store.rows() == [{"step": 2}, {"step": 3}]


def test_sets_are_stored_once_and_go_with_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "entropy.json"
    sets, later = ResultSets(path, RUN), ResultSets(path, RUN | {"step": 9})
    for settings, value in (({"length": 8}, 1), ({"length": 16}, 2), ({"length": 8}, 3)):
        sets.add(settings, {"value": value})
    assert [s["value"] for s in read_object(path)["sets"]] == [2, 3]
    assert {"length": 8} in sets
    assert {"length": 8} not in later
    later.add({"length": 4}, {"value": 4})
    assert [s["value"] for s in read_object(path)["sets"]] == [4]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"name": "gpt2", "sha256": "g", "vocab_size": 257}, "gpt2.*expected bytes"),
        ({"name": "bytes", "sha256": "b", "vocab_size": 300}, "257 tokens"),
    ],
)
def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path, tokenizer: dict[str, object], message: str) -> None:
    config = {"extra": {"corpus": {"tokenizer": {"name": "bytes", "sha256": "b"}}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = OpenModel(directory=tmp_path, identity=RUN, load=lambda: text.gpt("rope"))
    with pytest.raises(ValueError, match=message):
        opened.accept(tokenizer)
