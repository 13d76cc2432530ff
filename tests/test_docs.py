"""README and docs: links lead somewhere, commands and options exist, examples run, tables are those of the rows."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import render
from gape import positions
from gape.cli import app

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*(ROOT / name for name in ROOT_PAGES), *sorted((ROOT / "docs").rglob("*.md")))
}
GUIDE = [page for page in PAGES if page.startswith("docs/guide")]
#: Pages whose examples `tests/hf` runs, under both majors of transformers.
ELSEWHERE = {"docs/guide/hf.md", "docs/guide/forgetting.md"}
#: The command line, and names of commands that are about to change.
COMMANDS = typer.main.get_command(app)


def anchors(text: str) -> set[str]:
    """The names by which headings are linked to."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_the_navigation_of_the_site_names_every_page() -> None:
    listed = re.findall(r'"([\w./-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert set(PAGES) <= set(listed)
    assert len(listed) == len(set(listed))


def test_pages_that_code_names_exist() -> None:
    files = [path for part in ("src", "recipes", "benchmarks") for path in (ROOT / part).rglob("*.*")]
    for path in files:
        if path.suffix in {".py", ".toml"}:
            for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
                assert (ROOT / page).is_file(), (path, page)


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every command in code that calls `gape` or a script of benchmarks/."""
    code = "\n".join(
        re.findall(r"^(?: {4,}|)((?:gape|python benchmarks/\S+\.py) .+)$", text.replace("\\\n", " "), re.M)
    )
    for line in [*code.splitlines(), *re.findall(r"`((?:gape|python benchmarks/\S+\.py) [^`]+)`", text)]:
        yield shlex.split(line.replace("…", "..."), comments=True)


def leaf(command: Any, words: list[str]) -> tuple[Any, list[str]]:
    """The command that words name, and the words behind its name."""
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check(words: list[str]) -> None:
    """That a command and its options exist."""
    if words[0] == "gape":
        command, rest = leaf(COMMANDS, words[1:])
        options = {"--version", "--help"}
        assert not hasattr(command, "commands") or not rest or rest[0] in options, words
    else:
        script = typer.Typer()
        script.command()(importlib.import_module(Path(words[1]).stem).main)
        command, rest, options = typer.main.get_command(script), words[2:], {"--help"}
    options |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {word.partition("=")[0].strip("[]") for word in rest if re.match(r"\[?--\w", word)} - options
    assert not unknown, (words, unknown)


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    for words in command_lines(PAGES[page]):
        check(words)


@pytest.mark.parametrize("page", PAGES)
def test_files_and_targets_of_code_exist_and_settings_parse(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^(?: {4}|)make ([\w-]+)", PAGES[page], re.MULTILINE):
        assert f"\n{target}:" in makefile, target
    for file in re.findall(r"(?:python|bash) ((?:benchmarks|examples|docs|tests)/[\w/.-]+)", PAGES[page]):
        assert (ROOT / file).is_file(), file
    for block in re.findall(r"```toml\n(.*?)```", PAGES[page], re.DOTALL):
        tomllib.loads(block)


def test_a_wrong_option_is_noticed() -> None:
    with pytest.raises(AssertionError, match="--no-such-option"):
        check(["gape", "lm", "perplexity", "RUN", "--no-such-option"])
    with pytest.raises(AssertionError, match="no-such-command"):
        check(["gape", "lm", "no-such-command"])


@pytest.fixture
def known_schemes() -> Iterator[None]:
    """Schemes that an example registers are forgotten after it."""
    before = set(positions.available())
    yield
    for name in {name.removesuffix("+gape") for name in set(positions.available()) - before}:
        positions.unregister(name)


@pytest.mark.usefixtures("known_schemes")
@pytest.mark.parametrize("page", [page for page in ("README.md", *GUIDE) if page not in ELSEWHERE])
def test_examples_run(page: str) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL):
        exec(compile(block, page, "exec"), names)


def test_readme_has_its_three_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    assert ["gated_attention" in blocks[0], "GAPEAttention" in blocks[1], "generate" in blocks[2]] == [True] * 3


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- table: " in PAGES[page]])
def test_drawing_the_tables_again_changes_nothing(page: str) -> None:
    assert render.rendered(PAGES[page]) == PAGES[page]


def test_every_table_is_shown_somewhere() -> None:
    shown = {name for text in PAGES.values() for name in re.findall(r"<!-- table: (\S+) -->", text)}
    assert shown == set(render.TABLES)


def test_pages_stay_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120
    assert sum(len(PAGES[page].split()) for page in GUIDE) <= 15_000
