"""Needles through caches of equal bytes, with a tiny model on a CPU, and their table."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

pytest.importorskip("wonderwords")

import common
import evict
import gape.hf
from evict import Case
from gape.experiments import ruler
from gape.experiments.open_model import load_transformers
from gape.tasks.ruler.evaluation import prepare
from gape.tasks.ruler.readers import TransformersReader
from tables.eviction import NONE, eviction
from tests.benchmarks.test_scripts import ROOT, run, stored
from tests.cli.test_hf import with_words

PROMPT = 768
TINY = [
    "evict", "gated", "--needles", "needles", "--prompts", str(PROMPT), "--tasks", "niah_single_1", "--texts", "2",
    "--eps", "0.3", "--shares", "0.6", "--device", "cpu", "--trust",
]  # fmt: skip
OURS = ["--cache", "full,forgetting"]
try:
    importlib.import_module("gape.hf.presses")
    HAS_KVPRESS = True
except ImportError:
    HAS_KVPRESS = False
needs_kvpress = pytest.mark.skipif(not HAS_KVPRESS, reason="needs kvpress")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without gates, the same as `gape hf extend` changes it, and needles."""
    folder = tmp_path_factory.mktemp("evict")
    before = Path.cwd()
    os.chdir(folder)
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=with_words("plain"))
        tokenizer.save_pretrained("plain")
        model = load_transformers("plain")
        gape.hf.inject(model, context_length=64, position="hope+gape", start="paper", gates={"gate_floor": 40.0})
        gape.hf.center_keys(model, torch.randint(2, 40, (2, 32)))
        model.save_pretrained("gated")
        tokenizer.save_pretrained("gated")
        list(ruler.write(Path("needles"), tokenizer="plain", lengths=[PROMPT], count=2, tasks=["niah_single_1"]))
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all of it, for rows of its own."""
    for place in made.iterdir():
        (tmp_path / place.name).symlink_to(place)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(*, caches: str = "full,forgetting", with_question: bool = False, base: Path | None = None) -> evict.Job:
    settings = evict.Settings(
        device=torch.device("cpu"), model=Path("gated"), base=base, needles=Path("needles"), prompts=[PROMPT],
        tasks=["niah_single_1"], texts=2, eps=[0.3], shares=[0.6], caches=caches.split(","), bounds="queries",
        with_question=with_question, low=False, out=common.DATA / "evict.csv",
    )  # fmt: skip
    return evict.Job(settings)


def test_rows_are_written_once_and_what_is_missing_is_added(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, *OURS, "--eps", "") == 0
    assert [(row["cache"], row["setting"]) for row in stored("evict")] == [("full", ""), ("forgetting", "share 0.6")]
    assert run(*TINY, *OURS) == 0
    rows = stored("evict")
    assert [(row["cache"], row["setting"]) for row in rows[2:]] == [("forgetting", "eps 0.3")]
    for row in rows:
        assert not row["failed"]
        assert float(row["exact"]) in (0.0, 0.5, 1.0)
        assert float(row["nll"]) > 0
        assert (row["model"], row["base"], row["read_first"], row["texts"]) == ("gated", "", "context", "2")
    full, budget, eps = (float(row["share"]) for row in rows)
    # A landmark and a position beside 16 coordinates of a key and a value, in float32.
    assert full == pytest.approx(19 / 16, abs=1e-3)
    assert budget < 0.6
    assert eps < 1
    capsys.readouterr()
    assert run(*TINY, *OURS) == 0
    assert "all is measured" in capsys.readouterr().out
    assert stored("evict") == rows
    # Another order of reading is another row.
    assert run(*TINY, *OURS, "--eps", "", "--with-question") == 0
    assert [row["read_first"] for row in stored("evict")] == ["context"] * 3 + ["prompt"] * 2


def test_bytes_are_those_of_the_tensors_behind_the_context(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = {"full": 0, "forgetting": 0}
    own, outcome = job(), evict.outcome

    def watched(model: Any, item: Any, tokens: int, cache: Any, context: Any, **options: Any) -> evict.Outcome:
        """Count before the question is read."""
        with torch.no_grad():
            model.hidden(torch.from_numpy(item.prompt[:tokens])[None], cache=cache)
        if isinstance(cache, gape.hf.ForgettingCache):
            cache.evict()
            sums["forgetting"] += cache.nbytes
            return outcome(model, item, tokens, cache.fresh(), context, **options)
        sums["full"] += sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        return outcome(model, item, tokens, model.new_cache(), context, **options)

    monkeypatch.setattr(evict, "outcome", watched)
    for name, setting in (("full", ""), ("forgetting", "share 0.6")):
        row = own.figures(Case(PROMPT, "niah_single_1", False, name, setting), lambda done: None)
        assert int(row["bytes"]) == sums[name] // 2


def test_through_a_full_cache_a_text_scores_as_without_one(here: Path) -> None:
    for with_question in (False, True):
        own = job(with_question=with_question)
        model = gape.hf.LanguageModel(own.readers[False].model)
        expected = [score(model, item) for item in own.items]
        row = own.figures(Case(PROMPT, "niah_single_1", False, "full", ""), lambda done: None)
        assert float(row["nll"]) == pytest.approx(sum(expected) / len(expected), rel=1e-3)


@torch.no_grad()
def score(model: Any, item: Any) -> float:
    """The loss of an answer, all read at once."""
    ids = torch.cat([torch.from_numpy(item.prompt), torch.from_numpy(item.answer)])[None]
    x = model.hidden(ids[:, :-1])[:, -len(item.answer) :]
    return float(model.token_losses(x, ids[:, -len(item.answer) :]).mean())


def test_the_context_ends_before_the_question(here: Path) -> None:
    reader: TransformersReader = job().readers[False]
    for item in job().items:
        count = evict.context_tokens(reader, item)
        question = reader.decode(item.prompt[count:].tolist())
        assert "What" in question
        assert "found in the following text" not in question
    other = prepare(reader, [replace(job().samples[0], input="a b c")], max_length=2 * PROMPT, generate=False)
    with pytest.raises(ValueError, match="needles"):
        evict.context_tokens(reader, other[0])


def test_a_case_that_fails_is_a_row_and_is_not_tried_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(gape.hf.ForgettingCache):
        def __init__(self, *args: object, **options: object) -> None:
            raise MemoryError("too large\nfor this")

    with monkeypatch.context() as patched:
        patched.setattr(gape.hf, "ForgettingCache", Broken)
        assert run(*TINY, *OURS, "--eps", "") == 0
    assert [row["failed"] for row in stored("evict")] == ["", "MemoryError: too large"]
    assert run(*TINY, *OURS, "--eps", "") == 0
    assert len(stored("evict")) == 2


@needs_kvpress
@pytest.mark.parametrize("with_question", [False, True])
def test_presses_hold_no_more_than_the_forgetting_cache(here: Path, with_question: bool) -> None:
    more = ["--with-question"] if with_question else []
    assert run(*TINY, "--base", "plain", *more) == 0
    rows = stored("evict")
    names = [(row["base"], row["cache"]) for row in rows if row["setting"] == "share 0.6"]
    assert names == [("", "forgetting"), *((base, name) for base in ("", "plain") for name in evict.PRESSES)]
    budget = next(int(row["bytes"]) for row in rows if row["cache"] == "forgetting" and row["setting"] == "share 0.6")
    for row in rows:
        assert not row["failed"], row
        if row["setting"] == "share 0.6" and row["cache"] in evict.PRESSES:
            # One key of each of two heads in two layers may be missing.
            assert budget - 4 * 4 * (35 if not row["base"] else 32) <= int(row["bytes"]) <= budget
    assert run(*TINY, "--base", "plain", *more) == 0
    assert stored("evict") == rows
    assert "snapkv" in eviction(Path())


@needs_kvpress
def test_a_press_of_nothing_scores_as_the_full_cache(here: Path) -> None:
    own = job(caches="full,forgetting,knorm,expected")
    full = own.figures(Case(PROMPT, "niah_single_1", False, "full", ""), lambda done: None)
    row = own.row(Case(PROMPT, "niah_single_1", False, "forgetting", "eps 0.3"))
    own.rows.append(dict.fromkeys(evict.FIELDS, "") | row | {"bytes": str(10**9), "share": "0.5"})
    for name in ("knorm", "expected"):
        assert own.figures(Case(PROMPT, "niah_single_1", False, name, "eps 0.3"), lambda done: None) == full


def test_without_kvpress_the_line_that_installs_it_is_printed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "gape.hf.presses", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvpress"] + ["kvpress"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert run(*TINY) == 2
    assert "pip install kvpress" in capsys.readouterr().err
    assert not common.DATA.exists()


@pytest.mark.slow
def test_a_signal_ends_it_soon_and_its_rows_stay(here: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/evict.py"), *TINY[1:], "--cache", "full,forgetting"]
    eps = ",".join(str(0.001 + n / 2000) for n in range(400))
    process = subprocess.Popen([*command, "--eps", eps], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (common.DATA / "evict.csv").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.communicate()
    assert process.returncode == 143
    assert time.monotonic() - began < 10
    assert stored("evict")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "magic"], "cache: got str 'magic'"),
        (["--eps", "1"], "eps: got float 1.0"),
        (["--shares", "2"], "shares: got float 2.0"),
        (["--texts", "3"], "needles: got str 'needles, 2 of them'"),
        (["--bounds", "none"], "bounds: got str 'none'"),
        ([*OURS, "--base", "gated"], "base: got str 'gated'"),
    ],
)
def test_mistakes_end_with_two(
    here: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*TINY, *OURS, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_table_sets_presses_beside_ours_and_names_where_one_is_above(here: Path) -> None:
    assert eviction(Path()) == NONE
    usual = dict.fromkeys(evict.FIELDS, "") | {
        "device": "GPU", "dtype": "bfloat16", "model": "m", "read_first": "context", "prompt": "4096", "task": "a",
        "texts": "8", "commit": "c", "bytes": "1", "nll": "0.5", "share": "0.25",
    }  # fmt: skip
    step = {"setting": "share 0.25", "bounds": "queries"}
    for more in (
        {"cache": "full", "exact": "1", "share": "1"}, {"cache": "full", "base": "b", "exact": "0.9", "share": "1"},
        {"cache": "forgetting", "exact": "0.1"} | step, {"cache": "forgetting", "exact": "0.75"} | step,
        {"cache": "knorm", "exact": "0.25"} | step, {"cache": "snapkv", "base": "b", "exact": "0.875"} | step,
        {"cache": "tova", "failed": "OutOfMemoryError: too much", "exact": ""} | step,
        {"cache": "forgetting", "exact": "1", "prompt": "8192"} | step,
        {"cache": "knorm", "exact": "1", "prompt": "8192"} | step,
    ):  # fmt: skip
        common.append(common.DATA / "evict.csv", evict.FIELDS, usual | more)
    text = eviction(Path())
    assert "| 4,096 | share 0.25 | 0.25 | 1.00 (0.50) | 0.75 (0.50) | 0.25 (0.50) | – | – |" in text
    assert "| 4,096 | share 0.25 | 0.25 | 0.90 (0.50) | 0.75 (0.50) | – | 0.88 (0.50) | – |" in text
    assert "in 1 of 2 cells; a press finds more at 4,096 share 0.25: snapkv on b 0.88 against 0.75." in text
    assert "- tova share 0.25, a at 4,096: OutOfMemoryError: too much" in text
