"""A trained model on the bench: its text, the ways it can be run, and rows that are stored one by one.

Every row says what it is of (`kind`), how the model ran (`how`: dense, skipping or forgetting) and with which eps. It
is on the disk before the next measurement begins, and what was measured with the same settings is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gape.analysis.passages import Reader
from gape.analysis.tap import attended
from gape.cache.eviction import BOUNDS
from gape.cache.gpt import ForgettingCache, FullCache
from gape.data import Corpus
from gape.experiments.experiment import Log
from gape.experiments.open_model import OpenModel, refuse_length
from gape.experiments.result_store import ResultStore
from gape.experiments.run import NeedleRun
from gape.models.gpt import GPT
from gape.models.skipping import IMPL, skipping
from gape.ops.implementations import IMPLEMENTATIONS
from gape.ops.inputs import Problem
from gape.tasks import niah
from gape.tasks.perplexity import eviction_chunk
from gape.utils import run_info
from gape.utils.jsonl import Record
from gape.utils.validation import invalid_argument, weight, whole

ROWS = "forgetting.jsonl"
#: The precision in which weights are rounded, too.
SERVED = "bfloat16-weights"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is to be measured.

    Attributes:
        lengths: tokens of text, for language models.
        factors: multiples of the training length, for the needle task.
        eps: what a query may lose, for kernels and for caches.
        bounds: what forgetting caches go by.
        max_windows, last: of perplexity.
        samples: of the needle task.
        seed: which text.
        chunk: tokens that go through the model at once where there is a cache.

    Raises:
        ValueError: a value that cannot be; names it.
    """

    lengths: tuple[int, ...] = (65536, 131072)
    factors: tuple[int, ...] = (1, 2, 4)
    eps: tuple[float, ...] = (1e-3, 1e-4)
    bounds: tuple[str, ...] = ("weights", "queries")
    max_windows: int = 60
    last: int = 512
    samples: int = 1000
    seed: int = 0
    chunk: int = 16384

    def __post_init__(self) -> None:
        single = [(name, getattr(self, name)) for name in ("max_windows", "last", "samples", "chunk")]
        several = [(name, value) for name in ("lengths", "factors") for value in getattr(self, name)]
        for name, value in (*single, *several):
            # Rows hold 64-bit numbers.
            if whole(name, value) >= 2**63:
                raise invalid_argument(name, value, "a whole number below 2⁶³")
        whole("seed", self.seed, 0)
        for eps in self.eps:
            if weight("eps", eps) == 0:
                raise invalid_argument("eps", eps, "numbers above 0; dense attention is measured in any case")
        for bounds in self.bounds:
            if bounds not in BOUNDS:
                raise invalid_argument("bounds", bounds, f"some of {', '.join(BOUNDS)}")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to read a text.

    Attributes:
        name: how, eps, chunk and whatever else names it in rows.
        context: in which the model reads.
        new_cache: makes an empty cache that evicts; None without one.
    """

    name: Record
    context: Callable[[], Any] = nullcontext
    new_cache: Callable[[], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A trained model that is measured, with its text and its rows.

    Attributes:
        opened: where it lies, what names it, its tokenizer, and the settings of its run if it is one of ours.
        settings: what is to be measured.
        reader: a corpus, for a language model.
        precision: "float32", "bfloat16" (autocast) or :data:`SERVED`.
        log: called with a line for each measurement.
    """

    opened: OpenModel
    settings: Settings
    reader: Reader | None
    precision: str
    log: Log

    @property
    def kind(self) -> str:
        """Whether it is a language model, "lm", or one of the needle task, "niah"."""
        return "lm" if self.opened.run is None else self.opened.run.kind

    @property
    def model(self) -> Any:
        """The model: a GPT of ours, or one of transformers behind the same interface."""
        return self.opened.model

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.opened.model.parameters()).device

    @property
    def corpus(self) -> Corpus:
        """What a language model reads."""
        assert self.reader is not None
        assert self.reader.corpus is not None
        return self.reader.corpus

    @property
    def lengths(self) -> list[int]:
        """Tokens at which it is measured."""
        if isinstance(self.opened.run, NeedleRun):
            return [factor * self.opened.run.task.length for factor in self.settings.factors]
        return list(self.settings.lengths)

    @cached_property
    def shared(self) -> Record:
        """What all rows have in common."""
        conditions: Record = {"precision": self.precision, "device": self.device.type}
        if self.reader is not None:
            conditions["corpus"] = self.corpus.fingerprint()
        if isinstance(self.opened.run, NeedleRun):
            conditions["target"] = self.opened.run.task.target
        return self.opened.identity | conditions | {"text_seed": self.settings.seed}

    def refuse(self) -> None:
        """Refuse a model that cannot be measured at these lengths.

        Raises:
            ValueError: it has no gates, or some that cannot be measured, or no text is that long.
        """
        if not isinstance(self.model, GPT):
            from gape.hf.language import require_plain_gates  # noqa: PLC0415

            require_plain_gates(self.model.model)
            refuse_length(self.model.model, max(self.lengths))
        elif next(self.model.gates(), None) is None:
            raise invalid_argument("run", self.model.config.position, "a scheme with gates, which alone forgets")
        for length in self.lengths:
            self.text(length)

    def text(self, length: int) -> Tensor:
        """Token ids (1, length) of held-out text."""
        if isinstance(self.opened.run, NeedleRun):
            config = self.opened.run.task.at(length)
            return niah.sample(config, 1, seed=self.settings.seed, split="test", device=self.device).ids
        assert self.reader is not None
        (passage,) = self.reader.passages(length, 1, seed=self.settings.seed).items
        return torch.from_numpy(passage.ids.astype(np.int64))[None].to(self.device)

    def layers(self, length: int) -> list[Problem]:
        """What each layer with gates attends with on a text of `length`. Values are drawn: no tile depends on them."""
        ids = self.text(length)
        with self._autocast():
            layers = [layer for layer in attended(self.model, ids, logits_to_keep=1) if layer.gates is not None]
            problems = [layer.problem(0, length) for layer in layers]
        dtype = torch.float32 if self.precision == "float32" else torch.bfloat16
        return [
            replace(one, q=one.q.to(dtype), k=one.k.to(dtype), v=torch.randn_like(one.v, dtype=dtype))
            for one in problems
        ]

    @cached_property
    def skips(self) -> bool:
        """Whether the kernel that skips can run here; why not is said once."""
        reason = IMPLEMENTATIONS[IMPL].cannot(self.layers(16)[0])
        if reason is not None:
            self.log(f"{self.opened.identity['run']}: {IMPL} is left out: it {reason}")
        return reason is None

    @property
    def _store(self) -> ResultStore:
        return ResultStore(self.opened.directory / ROWS)

    def rows(self) -> list[Record]:
        """All rows of the weights that were stored so far."""
        own = [self.opened.identity.get(key) for key in ("step", "weights")]
        return [row for row in self._store.rows() if [row.get(key) for key in ("step", "weights")] == own]

    def once(self, about: Record, make: Callable[[], Record], describe: Callable[[Record], str]) -> None:
        """Measure and store a row, unless there is one; `describe` says what it is in the log."""
        own = {key: self.opened.identity.get(key) for key in ("step", "weights")}
        if not self._store.missing([own | self.shared | about]):
            return
        with self._autocast():
            results = make()
        stamp = run_info.stamp(self.device)
        self._store.append(self.shared | about | results | {"machine": stamp.pop("device")} | stamp)
        self.log(f"{self.opened.identity['run']}: {setting(about)}: {describe(results)}")

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def caches(self) -> Iterator[tuple[Record, Callable[[], Any]]]:
        """The full cache, then forgetting ones, those that the model's floors allow."""
        full, forgetting, model = FullCache, ForgettingCache, self.model
        if not isinstance(model, GPT):
            from gape import hf  # noqa: PLC0415

            full, forgetting, model = hf.FullCache, hf.ForgettingCache, model.model
        yield {"how": "dense", "eps": 0.0, "bounds": None}, partial(full, model)
        for bounds in self.settings.bounds:
            try:
                # Heads without a floor keep all their keys.
                cache = forgetting(model, eps=self.settings.eps[0], bounds=bounds, partial=True)
            except ValueError as error:
                self.log(f"{self.opened.identity['run']}: no forgetting cache by {bounds}: {error}")
                continue
            for eps in self.settings.eps:
                yield {"how": "forgetting", "eps": eps, "bounds": bounds}, partial(cache.fresh, eps)

    def ways(self, length: int) -> Iterator[Way]:
        """The ways to read a text of `length`: dense, skipping, and through forgetting caches."""
        chunk = {"chunk": self.settings.chunk}
        yield Way(name={"how": "dense", "impl": self._impl, "eps": 0.0} | chunk)
        for eps in self.settings.eps if self.skips else ():
            name = {"how": "skipping", "impl": IMPL, "eps": eps} | chunk
            yield Way(name=name, context=partial(skipping, self.model, eps))
        chunk = {"chunk": eviction_chunk(length, self.settings.chunk)}
        for name, new_cache in self.caches():
            if name["how"] == "forgetting":
                yield Way(name=name | chunk, new_cache=new_cache)

    @property
    def _impl(self) -> str:
        """The implementation that its attention runs dense."""
        if isinstance(self.model, GPT):
            return self.model.config.impl
        from gape.hf.implementations import OPERATOR_OF, supported_name  # noqa: PLC0415

        return OPERATOR_OF[supported_name(self.model.config._attn_implementation)]


def setting(about: Mapping[str, Any]) -> str:
    """A measurement in a few words."""
    parts = [about["kind"], f"at {about['length']:,}", about["how"], about.get("bounds")]
    parts += [f"eps {about['eps']:g}" if about.get("eps") else None]
    return " ".join(str(part) for part in parts if part)
