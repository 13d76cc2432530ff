"""`gape data`: exit codes, what it prints, and the recipes that ship."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest

import gape.cli
from gape.cli.data import settings
from gape.data import PrepareConfig, config
from gape.utils import recipe_files
from tests.data.books import texts, write_lines


def gape_exits(*arguments: object) -> int:
    before, sys.argv = sys.argv, ["gape", *map(str, arguments)]
    try:
        gape.cli.main()
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        sys.argv = before
    return 0


def test_prepare_prints_the_card_and_verify_checks_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = write_lines(tmp_path / "a.jsonl", texts(40))
    command = ("data", "prepare", lines, "--tokenizer", "bytes", "--out", tmp_path / "c")
    assert gape_exits(*command, "--heldout-fraction", 0.2, "--strata", "16,32") == 0
    printed = capsys.readouterr().out
    assert "a stratum L (16, 32) has those from L up to 2 L tokens" in printed
    assert "| a.jsonl | by id |" in printed
    assert gape_exits("data", "verify", tmp_path / "c") == 0
    (tmp_path / "c" / "index.bin").write_bytes(b"\0" * (tmp_path / "c" / "index.bin").stat().st_size)
    assert gape_exits("data", "verify", tmp_path / "c") == 2
    assert "index.bin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "--tokenizer", "bytes"), "inputs: got 'nowhere'"),
        (("a.jsonl",), "tokenizer: got str ''"),
        (("a.jsonl", "--tokenizer", "bytes", "--strata", "8,x"), "strata: got '8,x'"),
        (("a.jsonl", "--tokenizer", "bytes", "--text-field", "body"), "text_field: got 'body'"),
        (("data/fineweb", "a.jsonl"), "expected it alone"),
        (("other.toml",), "recipe: got 'other.toml', expected a TOML file or one of data/fineweb, data/longmino"),
    ],
)
def test_what_is_wrong_leaves_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", texts(3))
    assert gape_exits("data", "prepare", *arguments, "--out", "c") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", recipe_files.available(config.FOLDER))
def test_recipes_are_whole_and_explained(name: str) -> None:
    prepared = PrepareConfig(**config.load(name))
    for spec in (*prepared.inputs, *prepared.heldout):
        assert re.fullmatch(r"hf:[\w.-]+/[\w.-]+(@\w+)?#\S+", spec)
    lines = recipe_files.available(config.FOLDER)[name].read_text(encoding="utf-8").splitlines()
    for above, line in itertools.pairwise(lines):
        if " = " in line and not line.startswith(("#", " ")):
            assert above.startswith("#"), line


def test_an_option_wins_over_a_recipe() -> None:
    prepared = settings(["data/longmino"], {"tokenizer": "bytes", "strata": "64"})
    assert (prepared.tokenizer, prepared.strata, prepared.seed) == ("bytes", (64,), 0)
    assert prepared.inputs[0].startswith("hf:allenai/dolma3_longmino_mix-50B-1025@")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strat = [1]", "strat: unknown key, did you mean strata?"),
        ("strata = 5", "strata: got int 5"),
        ("seed = true", "seed: got bool True"),
        ("[", "not a TOML file"),
    ],
)
def test_mistakes_in_a_recipe_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        config.load(str(path))
