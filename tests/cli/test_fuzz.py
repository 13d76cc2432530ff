"""Argument lists and files that nobody would give on purpose: one line that says what is wrong, and nothing changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

pytest.importorskip("transformers")
pytest.importorskip("wonderwords")

import gape.cli
from gape.cli import app
from tests.cli.test_commands import TOY, gape_exits
from tests.hf.tiny import tiny
from tests.tasks import text

LISTS = 120
MORE_LISTS = 1200
ABSENT = object()
WHOLE = ("-1", "0", "99999999999999999999", "1e999", "nan", "inf", "", "x", "1.5", "-", "½", "0x10", "1_0", " 1")
REAL = ("nan", "inf", "-inf", "1e999", "-1e999", "-1", "", "x", "-0.0", "1e-999", "½", "99999999999999999999")
#: Files and folders that are no model, corpus, run, recipe or result.
PLACES = (
    "", ".", "..", "-", "/dev/null", "missing", "missing/deep", "empty", "folder", "bytes", "ünïcode", "\udcff", "a b",
    "x" * 300, "nested.json", "list.json", "cut.json", "rows.jsonl", "cut.toml", "nested.toml", "cut.safetensors",
    "long.safetensors", "cut.gguf", "long.gguf", "corpus", "run", "needle", "samples", "deep.json", "wrong.json", "hf:",
    "hf:@:#",
)  # fmt: skip
_HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
#: Files that begin as real ones do and go on as none does. Each ends its line: one that does not was cut by a crash.
BROKEN = {
    "bytes": bytes(range(256)) + b"\n", "ünïcode": "½\n".encode("utf-16"), "nested.json": b"[" * 100_000 + b"\n",
    "list.json": b"[1, 2]\n", "cut.json": b'{"run": \n', "deep.json": b'{"a": ' * 900 + b"1" + b"}" * 900 + b"\n",
    "wrong.json": b'{"run": [], "name": 3, "kind": {}, "model_type": 7, "gate_floor": "x", "seed": "a"}\n',
    "rows.jsonl": b'{"run": null}\n{"input": 7, "outputs": 3, "length": -1}\n[]\n', "cut.toml": b"[train\nsteps = \n",
    "nested.toml": b"a = " + b"[" * 5000 + b"\n", "cut.safetensors": struct.pack("<Q", 2**62) + b"{}\n",
    "long.safetensors": struct.pack("<Q", len(_HEADER)) + _HEADER + b"\n", "cut.gguf": b"GGUF\3\0\0\0\n",
    "long.gguf": b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62) + b"\n",
}  # fmt: skip
#: Arguments with which a command has little to do, so that one that is wrong is found beside them.
VALID: dict[str, tuple[str, ...]] = {
    "demo": ("train.max_steps=0",),
    "doctor": ("--length", "16"),
    "reproduce": ("accuracy", "--results", "missing"),
    "report": ("folder",),
    "data prepare": ("books/held.jsonl", "--tokenizer", "bytes", "--out", "new"),
    "data verify": ("corpus",),
    "lm train": ("lm/toy", "data=missing", "--out", "new"),
    "lm perplexity": ("run", "--data", "corpus", "--contexts", "16", "--last", "16", "--max-windows", "2"),
    "hf import": ("cut.gguf", "--out", "new"),
    "hf inject": ("model", "--out", "new", "--context-length", "16", "--dry-run"),
    "hf remove": ("model", "--out", "new"),
    "hf finetune": ("model", "corpus", "--out", "new", "--length", "0"),
    "hf perplexity": ("model", "--data", "corpus", "--contexts", "16", "--last", "16", "--max-windows", "2"),
    "niah train": ("toy.toml", "--list", "--out", "new"),
    "niah eval": ("needle", "--factors", "1", "--samples", "2"),
    "ruler generate": ("--tokenizer", "bytes", "--lengths", "384", "--tasks", "vt", "--count", "1", "--out", "new"),
    "ruler eval": ("run", "--data", "samples", "--tokenizer", "bytes", "--limit", "1", "--no-generate"),
    "ruler table": ("run",),
    "analyze entropy": ("run", "--data", "corpus", "--samples", "1"),
    "analyze spectrum": ("run", "--data", "corpus", "--samples", "1"),
    "analyze maps": ("run", "--data", "corpus", "--size", "4"),
    "analyze masks": ("run", "--data", "corpus", "--size", "4"),
    "analyze far-back": ("run", "--data", "corpus", "--context", "64", "--distances", "8", "--kinds", "ngram"),
}
#: Of a command on which a wrong value would let it go to work for long: options that are left as they are.
KEPT = {
    "demo": ("overrides",), "report": ("runs",), "lm train": ("overrides", "recipe"),
    "reproduce": ("results", "listing"),
    "niah train": ("dry", "recipe"), "hf finetune": ("length",),
}  # fmt: skip


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, below in command.commands.items():
        here = f"{path} {name}".strip()
        yield from commands(below, here) if hasattr(below, "commands") else [(here, below)]


COMMAND = typer.main.get_command(app)
COMMANDS = dict(commands(COMMAND))


def argument_lists(count: int, seed: int) -> Iterator[list[str]]:
    """Lists of a command that are right but for one to three values, or an option too many."""
    draw = random.Random(seed)
    for number in range(count):
        name = list(VALID)[number % len(VALID)]
        values = list(VALID[name])
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            values = changed(values, name, draw)
        yield [*name.split(), *values]


def changed(values: list[str], name: str, draw: random.Random) -> list[str]:
    if draw.random() < 0.05:
        return [*values, draw.choice(("--no-such-option", "--help", "-x", "--out"))]
    options = [p for p in COMMANDS[name].params if p.name not in ("help", *KEPT.get(name, ()))]
    if not options:
        return [*values, draw.choice(PLACES)]
    parameter = draw.choice(options)
    if parameter.param_type_name == "argument":
        return [hostile(None, draw), *values[1:]] if values else [hostile(None, draw)]
    if parameter.is_flag:
        return [*values, draw.choice([*parameter.opts, *parameter.secondary_opts])]
    return [*values, parameter.opts[0], hostile(parameter.default, draw)]


def hostile(default: object, draw: random.Random) -> str:
    """A value in the place of a default, mostly of its type."""
    if isinstance(default, int | float):
        return draw.choice(WHOLE if isinstance(default, int) else REAL)
    if draw.random() < 0.3:
        return ",".join(draw.choice(WHOLE + REAL) for _ in range(draw.randint(1, 3)))
    return draw.choice(PLACES)


def state(home: Path) -> dict[str, bytes | None]:
    """Everything under a folder but locks, which say only who works there."""
    fault = (path for path in home.rglob("*") if path.name != ".lock")
    return {str(path): path.read_bytes() if path.is_file() else None for path in fault}


def restore(home: Path, before: dict[str, bytes | None]) -> list[str]:
    """Put everything back as it was; what was not."""
    after = state(home)
    changed = [path for path in before.keys() | after.keys() if before.get(path, ABSENT) != after.get(path, ABSENT)]
    for path in map(Path, sorted(changed)):
        content = before.get(str(path), ABSENT)
        if isinstance(content, bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        elif content is ABSENT and path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return changed


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a corpus, runs, a model and samples at toy size, and with files that are none of these."""
    home = tmp_path_factory.mktemp("world")
    before = Path.cwd()
    os.chdir(home)
    text.corpus(home / "books")
    (home / "books" / "corpus").rename(home / "corpus")
    (home / "toy.toml").write_text(TOY, encoding="utf-8")
    toy = ["train.max_steps=1", "train.validate_every=0", "train.warmup_steps=0", "train.progress=off"]
    small = ["model.n_layer=1", "model.n_embd=16", "batch_size=2", "analysis.routing_every=1", "task.length=16"]
    more = ["evaluation.contexts=[]", "evaluation.last=16", "data=corpus", "--only", "p-rope+gape", "--out", "."]
    assert gape_exits("lm", "train", "lm/toy", *toy, *small, *more) == 0
    (home / "p-rope+gape").rename(home / "run")
    one = ["model.position=rope", "evaluation.factors=[1]", "analysis.samples=0", "--out", "."]
    assert gape_exits("niah", "train", "toy.toml", *one) == 0
    (home / "rope").rename(home / "needle")
    samples = ["--tokenizer", "bytes", "--lengths", "384", "--tasks", "vt", "--count", "1", "--out", "samples"]
    assert gape_exits("ruler", "generate", *samples) == 0
    tiny("llama", vocab_size=257).save_pretrained(home / "model")
    (home / "folder").mkdir()
    (home / "empty").touch()
    for name, data in BROKEN.items():
        (home / name).write_bytes(data)
    yield home
    os.chdir(before)


@pytest.fixture
def quick(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The world, with commands that are put together once: that takes longer than a refusal."""
    monkeypatch.setattr(gape.cli, "app", COMMAND)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return world


def outcome(arguments: list[str], home: Path, capsys: pytest.CaptureFixture[str], *, named: str = "") -> str | None:
    """What is wrong with how a command ended, None for nothing."""
    before = state(home)
    try:
        code = gape_exits(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    errors, changes = capsys.readouterr().err, restore(home, before)
    if code == 0 and not named:
        return None
    if code != 2:
        return f"left with {code}: {errors}"
    if changes:
        return f"changed {changes}"
    last = errors.strip().splitlines()[-1]
    return None if last.startswith(("gape: ", "Error")) and named in last else f"said {errors}"


@pytest.mark.parametrize(
    ("count", "seed"), [(LISTS, 0), pytest.param(MORE_LISTS, 1, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_random_arguments_are_refused_in_one_line(
    quick: Path, capsys: pytest.CaptureFixture[str], count: int, seed: int
) -> None:
    wrong = {}
    for number, arguments in enumerate(argument_lists(count, seed)):
        if fault := outcome(arguments, quick, capsys):
            wrong[number] = arguments, fault
    assert not wrong


#: What the second and later readers of a file are given; the first is given all that is broken.
FEW = ("bytes", "list.json", "cut.json", "wrong.json")
#: A file that a command reads, and such commands.
READ = {
    "recipe.toml": (
        "niah train recipe.toml --list", "lm train recipe.toml --list", "data prepare recipe.toml --out new",
    ),
    "run/run.json": (
        "lm perplexity run --data corpus --contexts 16 --last 16", "analyze entropy run --data corpus",
        "ruler eval run --data samples",
    ),
    "needle/run.json": ("niah eval needle",),
    "needle/eval.jsonl": ("niah eval needle --factors 1 --samples 2", "report needle"),
    "run/perplexity.jsonl": ("lm perplexity run --data corpus --contexts 16 --last 16", "report run"),
    "run/routing.jsonl": ("report run",),
    "run/ruler.jsonl": ("ruler table run",),
    "run/entropy.json": ("report run",),
    "run/config.json": ("lm perplexity run --data corpus --contexts 16 --last 16",),
    "corpus/card.json": ("data verify corpus", "lm perplexity run --data corpus", "hf perplexity model --data corpus"),
    "samples/vt_384.jsonl": (
        "ruler eval run --data samples",
    ),
    "samples/manifest.json": ("ruler generate --tokenizer bytes --tasks vt --lengths 512 --count 1 --out samples",),
    "squad": ("ruler generate --tokenizer bytes --tasks qa_1 --lengths 384 --squad squad --out new",),
    "hotpotqa": ("ruler generate --tokenizer bytes --tasks qa_2 --lengths 384 --hotpotqa hotpotqa --out new",),
    "floors.json": ("hf inject model --out new --context-length 16 --floors floors.json",),
    "model/config.json": (
        "hf inject model --out new", "hf remove model --out new",
        "hf perplexity model --data corpus --contexts 16 --last 16",
    ),
    "model/model.safetensors": (
        "hf inject model --out new --context-length 16", "hf perplexity model --data corpus --contexts 16 --last 16",
    ),
    "model.gguf": ("hf import model.gguf --out new",),
    "model.bin": ("hf import model.bin --out new",),
    "tokens/tokenizer.json": ("data prepare books/held.jsonl --tokenizer tokens --out new",),
}  # fmt: skip


@pytest.mark.parametrize("place", READ)
def test_a_broken_file_is_named(place: str, quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, wrong = quick / place, {}
    before = path.read_bytes() if path.is_file() else None
    path.parent.mkdir(exist_ok=True)
    try:
        for name, content in BROKEN.items():
            path.write_bytes(content)
            for command in READ[place] if name in FEW else READ[place][:1]:
                if fault := outcome(command.split(), quick, capsys, named=place.split("/", maxsplit=1)[0]):
                    wrong[name, command] = fault
    finally:
        path.unlink() if before is None else path.write_bytes(before)
    assert not wrong
