"""What `gape explore` does: open a model, take a text, compute its view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_safetensors
from torch import Tensor

from gape.data import load_tokenizer
from gape.experiments.experiment import pick_device
from gape.experiments.open_model import OpenModel, is_transformers, model_home, open_model, run_tokenizer
from gape.explore.exploration import Exploration, Mark, explore
from gape.explore.notebook import token_text
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.tasks import niah
from gape.utils.files import from_json
from gape.utils.jsonl import Record
from gape.utils.progress import ProgressTable
from gape.utils.validation import invalid_argument, whole

#: Texts of the tokens of the needle task.
SYMBOLS = (*"abcdefghijklmn", "KEY", "=", "?", *"0123456789")
#: A needle in a text, and the sentences around it.
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_NEEDLE, _ANSWER = "The magic number of the lighthouse is ", "7419352"
_QUESTION = "\nWhat is the magic number of the lighthouse? The magic number of the lighthouse is"


@dataclass(frozen=True, kw_only=True)
class Passage:
    """What a model reads: ids, int64 (1, N), the text of a token, and tokens to underline.

    `sources` has for each query the key with what it should retrieve, −1 for none; None where that is not known.
    """

    ids: Tensor
    decode: Callable[[int], str]
    marks: tuple[Mark, ...] = ()
    sources: Tensor | None = None


def explored(
    model: Path | None = None,
    *,
    text: Path | None = None,
    prompt: str | None = None,
    needle: int | None = None,
    tokenizer: str | None = None,
    tokens: int = 16384,
    seed: int = 0,
    device: str = "auto",
) -> Exploration:
    """Open a model, None for that of the package, read a text and compute the view; shows progress.

    At most one of `text` (a file), `prompt` and `needle` (tokens of a text with a needle) is given. Refused are a model
    that is not there or cannot be looked into, and a text that is not there or too short.
    """
    texts = {"text": text, "prompt": prompt, "needle": needle}
    named = [name for name, value in texts.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"text, prompt, needle: got {' and '.join(named)}, expected one of them")
    whole("tokens", tokens, 2)
    if needle is not None:
        whole("needle", needle, 16)
    target = pick_device(device)
    opened = shipped(target) if model is None else open_model(model, target)
    # The haystack that a model was trained on; None for one of texts.
    task = opened.identity.get("task") if opened.run is None else opened.run.task
    task = niah.NIAHConfig(**task) if isinstance(task, dict) else task
    if not isinstance(task, niah.NIAHConfig):
        read = _passage(opened, tokenizer, text, prompt, needle, tokens)
    elif text is not None or prompt is not None:
        raise invalid_argument("text", text or prompt, "none: this model reads --needle alone")
    else:
        read = haystack(task, needle or 4 * task.length, seed)
    about = {"name": opened.identity["run"], "position": opened.identity["position"]}
    total = sum(hasattr(m, "gape_wiring") or type(m).__name__ == "GAPEAttention" for m in opened.model.modules())
    with ProgressTable(unit="layer") as table:
        table.show(str(about["name"]), 0, total)
        return explore(
            opened.model, read.ids.to(target), read.decode, title=f"gape explore: {about['name']}", about=about,
            marks=read.marks, sources=read.sources, progress=lambda done: table.show(str(about["name"]), done, total),
        )  # fmt: skip


def shipped(device: torch.device) -> OpenModel:
    """The needle model that comes with the package."""
    home = resources("gape.explore").joinpath("needle")
    config: Record = from_json(home.joinpath("config.json").read_bytes())
    model = GPT(GPTConfig.from_dict(config["model"]))
    model.load_state_dict(from_safetensors(home.joinpath("model.safetensors").read_bytes()))
    identity = {"run": "needle", "position": model.config.position, "task": config["task"]}
    return OpenModel(directory=Path("needle"), identity=identity, load=lambda: model.to(device).eval())


def _passage(
    opened: OpenModel, spec: str | None, file: Path | None, prompt: str | None, needle: int | None, tokens: int
) -> Passage:
    """The text for a model of texts."""
    if is_transformers(opened.directory):
        tokenizer = load_tokenizer(spec or str(model_home(opened.directory)))
    else:
        tokenizer = run_tokenizer(opened.directory, spec)
        opened.accept(tokenizer.identity())
    decode = token_text(tokenizer)
    if needle is not None:
        return _needle_text(tokenizer, decode, needle)
    if file is not None:
        try:
            prompt = file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"text: {file} is no UTF-8: {error}") from error
    if prompt is None:
        raise ValueError("text: got nothing, expected one of --text FILE, --prompt TEXT and --needle N")
    ids = tokenizer.encode(prompt)[:tokens]
    if len(ids) < 2:
        raise invalid_argument("text", prompt, "one of at least two tokens")
    return Passage(ids=torch.tensor([ids]), decode=decode)


def haystack(task: niah.NIAHConfig, length: int, seed: int) -> Passage:
    """A sequence of the needle task at some length, with its needles marked."""
    config = task.at(length)
    drawn = niah.sample(config, 1, seed=seed, split="test")
    starts = drawn.needles[0].tolist()
    wanted = starts[config.target_index]
    marks = tuple(
        Mark(start=start, length=niah.NEEDLE, label="answer" if start == wanted else "needle") for start in starts
    )
    sources = torch.full((length,), -1)
    sources[-1] = wanted + niah.NEEDLE - 1
    return Passage(ids=drawn.ids, decode=SYMBOLS.__getitem__, marks=marks, sources=sources)


def _needle_text(tokenizer: Any, decode: Callable[[int], str], length: int) -> Passage:
    """Sentences with a number among them, and a question about it at the end."""
    question, needle, noise = (tokenizer.encode(text) for text in (_QUESTION, _NEEDLE, _NOISE))
    answer = tokenizer.encode(_ANSWER + ".")
    room = length - len(question) - len(needle) - len(answer)
    if room < 2 * len(noise):
        raise invalid_argument("needle", length, f"at least {length - room + 2 * len(noise)} tokens")
    before = noise * (room // len(noise) // 2)
    after = (noise * (room // len(noise) + 1))[: room - len(before)]
    ids = before + needle + answer + after + question
    start = len(before) + len(needle)
    sources = torch.full((len(ids),), -1)
    sources[-1] = start
    marks = (
        Mark(start=len(before), length=len(needle), label="needle"),
        Mark(start=start, length=len(answer), label="answer"),
    )
    return Passage(ids=torch.tensor([ids]), decode=decode, marks=marks, sources=sources)
