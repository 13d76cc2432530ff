"""A trained model on the bench: its text, the ways it can be run, and rows that are kept one by one.

Every row says what it is of (`kind`), how the model ran (`how`: dense, skipping or forgetting) and with which eps. It
is on the disk before the next measurement begins, and what was measured as asked is not measured again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gape.analysis.passages import Reader
from gape.analysis.runs import Trained
from gape.cache.kv import BOUNDS, piece
from gape.experiments.experiment import Record, Say, answers
from gape.experiments.forgetting_models import Precision, Subject
from gape.experiments.run import NeedleRun, Run
from gape.models.gpt import GPT
from gape.models.skipping import IMPL, skipping
from gape.ops import dispatch
from gape.ops.inputs import Problem
from gape.report.results import read_rows
from gape.tasks import niah
from gape.utils import jsonl, run_info
from gape.utils.validation import invalid_argument, positive_number, weight, whole

if TYPE_CHECKING:
    from gape.hf import LanguageModel

ROWS = "forgetting.jsonl"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be measured.

    Attributes:
        lengths: tokens of text, for language models.
        factors: multiples of the training length, for the needle task.
        eps: what a query may lose, for kernels and for caches.
        bounds: what forgetting caches go by.
        batches: samples that are decoded together.
        tokens: decoded one by one after the prompt.
        max_windows, last: of perplexity.
        samples: of the needle task.
        seed: which text.
        chunk: tokens that go through the model at once where there is a cache.
        seconds: about how long each time is taken.

    Raises:
        ValueError: a value that cannot be; names it.
    """

    lengths: tuple[int, ...] = (65536, 131072)
    factors: tuple[int, ...] = (1, 2, 4)
    eps: tuple[float, ...] = (1e-3, 1e-4)
    bounds: tuple[str, ...] = ("weights", "queries")
    batches: tuple[int, ...] = (1, 8)
    tokens: int = 64
    max_windows: int = 60
    last: int = 512
    samples: int = 1000
    seed: int = 0
    chunk: int = 16384
    seconds: float = 0.5

    def __post_init__(self) -> None:
        for name in ("lengths", "factors", "batches"):
            for value in getattr(self, name):
                whole(name, value)
        for eps in self.eps:
            if weight("eps", eps) == 0:
                raise invalid_argument("eps", eps, "numbers above 0; dense attention is measured in any case")
        for name in ("max_windows", "last", "samples", "chunk"):
            whole(name, getattr(self, name))
        whole("tokens", self.tokens, 2)
        whole("seed", self.seed, 0)
        positive_number("seconds", self.seconds)
        for bounds in self.bounds:
            if bounds not in BOUNDS:
                raise invalid_argument("bounds", bounds, f"some of {', '.join(BOUNDS)}")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run the model.

    Attributes:
        told: how, eps and whatever else names it in rows.
        reader: what reads a text: the model, or something that looks like it.
        context: in which it does.
    """

    told: Record
    reader: Any
    context: Callable[[], Any] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A model on the bench.

    Attributes:
        trained: where it lies, what names it, and its tokenizer.
        subject: the model as it is measured.
        run: its settings; None for a model of transformers.
        asked: what is to be measured.
        reader: a corpus, for a language model.
        precision: in which it runs.
        say: told how it goes.
    """

    trained: Trained
    subject: Subject
    run: Run | None
    asked: Asked
    reader: Reader | None
    precision: Precision
    say: Say

    @property
    def kind(self) -> str:
        """Whether it is a language model, "lm", or one of the needle task, "niah"."""
        return "lm" if self.run is None else self.run.kind

    @property
    def model(self) -> GPT | LanguageModel:
        """The model."""
        return self.subject.model

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.model.parameters()).device

    @property
    def lengths(self) -> list[int]:
        """Tokens at which it is measured."""
        if isinstance(self.run, NeedleRun):
            return [factor * self.run.task.length for factor in self.asked.factors]
        return list(self.asked.lengths)

    @cached_property
    def shared(self) -> Record:
        """What all rows have in common."""
        how: Record = {"precision": self.precision.name, "device": self.device.type}
        if self.reader is not None and self.reader.corpus is not None:
            how["corpus"] = self.reader.corpus.fingerprint()
        if isinstance(self.run, NeedleRun):
            how["target"] = self.run.task.target
        return self.trained.identity | how | {"text_seed": self.asked.seed}

    def text(self, length: int, count: int) -> Tensor:
        """Token ids (count, length) of held-out text.

        Documents that are long enough come first, then other windows of theirs; texts come again where these are few.
        """
        if isinstance(self.run, NeedleRun):
            config = self.run.task.at(length)
            return niah.sample(config, count, seed=self.asked.seed, split="test", device=self.device).ids
        assert self.reader is not None
        found: dict[str, Any] = {}
        for seed in itertools.count(self.asked.seed):
            known = len(found)
            found |= {passage.id: passage.ids for passage in self.reader.passages(length, count, seed=seed).items}
            if len(found) == known or len(found) >= count:
                break
        texts = list(found.values())
        rows = [texts[at % len(texts)] for at in range(count)]
        return torch.from_numpy(np.stack(rows).astype(np.int64)).to(self.device)

    def layers(self, length: int) -> list[Problem]:
        """What each layer with gates attends with on a text of `length`.

        Values are drawn: no time and no tile depends on them.
        """
        dtype = self.precision.products
        with self._autocast():
            return [
                replace(one, q=one.q.to(dtype), k=one.k.to(dtype), v=torch.randn_like(one.v, dtype=dtype))
                for one in self.subject.attended(self.text(length, 1))
            ]

    @cached_property
    def skips(self) -> bool:
        """Whether the kernel that skips can run here; why not is said once."""
        reason = dispatch.cannot(IMPL, self.layers(16)[0])
        if reason is not None:
            self.say(f"{self.trained.identity['run']}: {IMPL} is left out: it {reason}")
        return reason is None

    def rows(self) -> list[Record]:
        """All rows of the weights that were kept so far."""
        path = self.trained.directory / ROWS
        own = [self.trained.identity.get(key) for key in ("step", "weights")]
        stored = read_rows(path) if path.is_file() else []
        return [row for row in stored if [row.get(key) for key in ("step", "weights")] == own]

    def missing(self, about: Record) -> bool:
        """Whether no row answers what a measurement is told by."""
        return not any(answers(row, self.shared | about) for row in self.rows())

    def once(self, about: Record, make: Callable[[], Record], told: Callable[[Record], str]) -> None:
        """Measure and keep a row, unless there is one that answers; `told` says what was found."""
        if not self.missing(about):
            return
        with self._autocast():
            found = make()
        made = run_info.stamp(self.device)
        made_by = {"machine": made.pop("device")} | made
        jsonl.append(self.trained.directory / ROWS, self.shared | about | found | made_by)
        self.say(f"{self.trained.identity['run']}: {setting(about)}: {told(found)}")

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision.autocast)

    def caches(self, capacity: int) -> Iterator[tuple[Record, Callable[[], Any]]]:
        """The full cache, then forgetting ones, those that the model's floors allow."""
        yield {"how": "dense", "eps": 0.0, "bounds": None}, partial(self.subject.full_cache, capacity)
        for bounds in self.asked.bounds:
            try:
                # Heads without a floor keep all their keys.
                made = self.subject.forgetting_cache(eps=self.asked.eps[0], bounds=bounds, partial=True)
            except ValueError as error:
                self.say(f"{self.trained.identity['run']}: no forgetting cache by {bounds}: {error}")
                continue
            for eps in self.asked.eps:
                yield {"how": "forgetting", "eps": eps, "bounds": bounds}, partial(made.fresh, eps)

    def ways(self, length: int) -> Iterator[Way]:
        """The ways to read a text of `length`: dense, skipping, and through forgetting caches."""
        asked, model = self.asked, self.model
        yield Way(told={"how": "dense", "impl": self.subject.impl, "eps": 0.0, "chunk": asked.chunk}, reader=model)
        for eps in asked.eps if self.skips else ():
            told = {"how": "skipping", "impl": IMPL, "eps": eps, "chunk": asked.chunk}
            yield Way(told=told, reader=model, context=partial(skipping, model, eps))
        chunk = piece(length, asked.chunk)
        for told, make in self.caches(length):
            if told["how"] == "forgetting":
                yield Way(told=told | {"chunk": chunk}, reader=Forgetful(model, make, chunk))


class Forgetful:
    """A model that reads through forgetting caches, in chunks: as much of a GPT as perplexity and needles need.

    Attributes:
        held: of every sample, the share of the keys that were held when the last chunk had come, over layers that
            forget and their heads.
    """

    def __init__(self, model: GPT | LanguageModel, make_cache: Callable[[], Any], chunk: int) -> None:
        self._model, self._make_cache, self._chunk = model, make_cache, chunk
        self.hidden, self.token_losses, self.parameters = model.hidden, model.token_losses, model.parameters
        self.held: list[float] = []

    def new_cache(self, capacity: int = 0) -> Any:
        """A forgetting cache, whatever room is asked for."""
        return self._make_cache()

    def __call__(self, ids: Tensor, *, logits_to_keep: int = 0) -> Any:
        """What the model says of ids (B, N), read piece by piece."""
        cache = self._make_cache()
        *before, last = torch.split(ids, self._chunk, dim=1)
        for part in before:
            self._model(part, cache=cache, logits_to_keep=1)
        answer = self._model(last, cache=cache, logits_to_keep=logits_to_keep)
        kept = [keys for layer in cache.kept for keys in layer]
        self.held += [sum(kept) / len(kept) / ids.size(1)] * ids.size(0)
        return answer


def setting(about: Mapping[str, Any]) -> str:
    """A measurement in a few words."""
    parts = [about["kind"], about.get("what"), f"at {about['length']:,}", about["how"], about.get("bounds")]
    parts += [about.get("impl") if about["kind"] in ("prefill", "tiles") else None]
    parts += [f"eps {about['eps']:g}" if about.get("eps") else None]
    parts += [f"batch {about['batch']}" if "batch" in about else None]
    return " ".join(str(part) for part in parts if part)
