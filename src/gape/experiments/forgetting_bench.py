"""A trained model on the bench: its text, the ways it can be run, and rows that are stored one by one.

Every row says what it is of (`kind`), how the model ran (`how`: dense, skipping or forgetting) and with which eps. It
is on the disk before the next measurement begins, and what was measured with the same settings is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gape.analysis.passages import Reader
from gape.analysis.tap import attended
from gape.cache.eviction import BOUNDS
from gape.cache.gpt import ForgettingCache, FullCache
from gape.experiments.experiment import Log, wants_bfloat16
from gape.experiments.open_model import OpenModel
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

if TYPE_CHECKING:
    from gape.hf import LanguageModel

ROWS = "forgetting.jsonl"
#: The --precision in which weights are rounded, too.
SERVED = "bfloat16-weights"


class Precision(NamedTuple):
    """In which precision a model runs.

    Attributes:
        name: in rows.
        autocast: whether bfloat16 is autocast.
        weights: dtype of the weights; gates of injected models stay in float32.
    """

    name: str
    autocast: bool
    weights: torch.dtype

    @property
    def products(self) -> torch.dtype:
        """The dtype in which attention multiplies."""
        return torch.bfloat16 if self.autocast else self.weights

    @staticmethod
    def parse(name: str, device: torch.device) -> Precision:
        """What a name means on a device.

        Raises:
            ValueError: no such precision.
        """
        if name == SERVED:
            return Precision(name, autocast=False, weights=torch.bfloat16)
        low = wants_bfloat16(name, device, SERVED)
        return Precision("bfloat16" if low else "float32", autocast=low, weights=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A language model as it is measured: a GPT of ours, or one of transformers behind the same interface.

    Attributes:
        model: in eval mode.
        impl: the implementation that its attention runs dense.
        attended: ids (B, N) → what each layer with gates attends with.
        full_cache: makes an empty cache in pages that keeps everything.
        forgetting_cache: called as :class:`gape.cache.gpt.ForgettingCache` is, without the model.
        check: refuses, with a ValueError, a model that cannot be measured on texts of so many tokens.
    """

    model: GPT | LanguageModel
    impl: str
    attended: Callable[[Tensor], list[Problem]]
    full_cache: Callable[[], Any]
    forgetting_cache: Callable[..., Any]
    check: Callable[[int], None]


def gpt_subject(model: GPT) -> Subject:
    """A GPT as it is measured."""
    width = next(model.blocks()).attention.head_dim

    def problems(ids: Tensor) -> list[Problem]:
        layers = (layer.problem(0, layer.visibility.n_q) for layer in attended(model, ids, logits_to_keep=1))
        return [replace(problem, v=problem.k.new_empty(*problem.k.shape[:3], width)) for problem in layers]

    def check(longest: int) -> None:
        if next(model.gates(), None) is None:
            raise invalid_argument("run", model.config.position, "a scheme with gates, which alone forgets")

    return Subject(
        model=model, impl=model.config.impl, attended=problems, check=check,
        full_cache=partial(FullCache, model), forgetting_cache=partial(ForgettingCache, model),
    )  # fmt: skip


def injected_subject(model: LanguageModel) -> Subject:
    """A model that gates were put into, as it is measured."""
    from gape import hf  # noqa: PLC0415
    from gape.experiments.open_model import refuse_length  # noqa: PLC0415
    from gape.hf.implementations import OPERATOR_OF, supported_name  # noqa: PLC0415
    from gape.hf.language import attention_inputs, gated_layers  # noqa: PLC0415

    def check(longest: int) -> None:
        gated_layers(model.model)
        refuse_length(model.model, longest)

    return Subject(
        model=model, impl=OPERATOR_OF[supported_name(model.config._attn_implementation)], check=check,
        attended=partial(attention_inputs, model), full_cache=partial(hf.FullCache, model.model),
        forgetting_cache=partial(hf.ForgettingCache, model.model),
    )  # fmt: skip


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
        for name in ("lengths", "factors"):
            for value in getattr(self, name):
                whole(name, value)
        for eps in self.eps:
            if weight("eps", eps) == 0:
                raise invalid_argument("eps", eps, "numbers above 0; dense attention is measured in any case")
        for name in ("max_windows", "last", "samples", "chunk"):
            whole(name, getattr(self, name))
            # Rows hold 64-bit numbers.
            if getattr(self, name) >= 2**63:
                raise invalid_argument(name, getattr(self, name), "a whole number below 2⁶³")
        whole("seed", self.seed, 0)
        for bounds in self.bounds:
            if bounds not in BOUNDS:
                raise invalid_argument("bounds", bounds, f"some of {', '.join(BOUNDS)}")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run the model.

    Attributes:
        name: how, eps and whatever else names it in rows.
        reader: what reads a text: the model, or something with its interface.
        context: in which it does.
    """

    name: Record
    reader: Any
    context: Callable[[], Any] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A model on the bench.

    Attributes:
        opened: where it lies, what names it, its tokenizer, and the settings of its run if it is one of ours.
        subject: the model as it is measured.
        settings: what is to be measured.
        reader: a corpus, for a language model.
        precision: in which it runs.
        log: called with a line for each measurement.
    """

    opened: OpenModel
    subject: Subject
    settings: Settings
    reader: Reader | None
    precision: Precision
    log: Log

    @property
    def kind(self) -> str:
        """Whether it is a language model, "lm", or one of the needle task, "niah"."""
        return "lm" if self.opened.run is None else self.opened.run.kind

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
        if isinstance(self.opened.run, NeedleRun):
            return [factor * self.opened.run.task.length for factor in self.settings.factors]
        return list(self.settings.lengths)

    @cached_property
    def shared(self) -> Record:
        """What all rows have in common."""
        conditions: Record = {"precision": self.precision.name, "device": self.device.type}
        if self.reader is not None and self.reader.corpus is not None:
            conditions["corpus"] = self.reader.corpus.fingerprint()
        if isinstance(self.opened.run, NeedleRun):
            conditions["target"] = self.opened.run.task.target
        return self.opened.identity | conditions | {"text_seed": self.settings.seed}

    def text(self, length: int) -> Tensor:
        """Token ids (1, length) of held-out text."""
        if isinstance(self.opened.run, NeedleRun):
            config = self.opened.run.task.at(length)
            return niah.sample(config, 1, seed=self.settings.seed, split="test", device=self.device).ids
        assert self.reader is not None
        (passage,) = self.reader.passages(length, 1, seed=self.settings.seed).items
        return torch.from_numpy(passage.ids.astype(np.int64))[None].to(self.device)

    def layers(self, length: int) -> list[Problem]:
        """What each layer with gates attends with on a text of `length`.

        Values are drawn: no tile depends on them.
        """
        dtype = self.precision.products
        with self._autocast():
            return [
                replace(one, q=one.q.to(dtype), k=one.k.to(dtype), v=torch.randn_like(one.v, dtype=dtype))
                for one in self.subject.attended(self.text(length))
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
        environment = {"machine": stamp.pop("device")} | stamp
        self._store.append(self.shared | about | results | environment)
        self.log(f"{self.opened.identity['run']}: {setting(about)}: {describe(results)}")

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision.autocast)

    def caches(self) -> Iterator[tuple[Record, Callable[[], Any]]]:
        """The full cache, then forgetting ones, those that the model's floors allow."""
        yield {"how": "dense", "eps": 0.0, "bounds": None}, self.subject.full_cache
        for bounds in self.settings.bounds:
            try:
                # Heads without a floor keep all their keys.
                cache = self.subject.forgetting_cache(eps=self.settings.eps[0], bounds=bounds, partial=True)
            except ValueError as error:
                self.log(f"{self.opened.identity['run']}: no forgetting cache by {bounds}: {error}")
                continue
            for eps in self.settings.eps:
                yield {"how": "forgetting", "eps": eps, "bounds": bounds}, partial(cache.fresh, eps)

    def ways(self, length: int) -> Iterator[Way]:
        """The ways to read a text of `length`: dense, skipping, and through forgetting caches."""
        settings, model = self.settings, self.model
        yield Way(name={"how": "dense", "impl": self.subject.impl, "eps": 0.0, "chunk": settings.chunk}, reader=model)
        for eps in settings.eps if self.skips else ():
            name = {"how": "skipping", "impl": IMPL, "eps": eps, "chunk": settings.chunk}
            yield Way(name=name, reader=model, context=partial(skipping, model, eps))
        chunk = eviction_chunk(length, settings.chunk)
        for name, make in self.caches():
            if name["how"] == "forgetting":
                yield Way(name=name | {"chunk": chunk}, reader=Forgetful(model, make, chunk))


class Forgetful:
    """A model that reads through forgetting caches, in chunks: as much of a GPT as perplexity and needles need.

    Attributes:
        key_shares: of every sample, the share of the keys that were cached when the last chunk had come, over layers
            with gates and their heads.
    """

    def __init__(self, model: GPT | LanguageModel, make_cache: Callable[[], Any], chunk: int) -> None:
        self._model, self._make_cache, self._chunk = model, make_cache, chunk
        self.hidden, self.token_losses, self.parameters = model.hidden, model.token_losses, model.parameters
        self.key_shares: list[float] = []

    def new_cache(self, capacity: int = 0) -> Any:
        """A forgetting cache; the capacity does not matter."""
        return self._make_cache()

    def __call__(self, ids: Tensor, *, logits_to_keep: int = 0) -> Any:
        """What the model says of ids (B, N), read piece by piece."""
        cache = self._make_cache()
        *before, last = torch.split(ids, self._chunk, dim=1)
        for part in before:
            self._model(part, cache=cache, logits_to_keep=1)
        answer = self._model(last, cache=cache, logits_to_keep=logits_to_keep)
        counts = [keys for layer in cache.num_keys for keys in layer]
        self.key_shares += [sum(counts) / len(counts) / ids.size(1)] * ids.size(0)
        return answer


def setting(about: Mapping[str, Any]) -> str:
    """A measurement in a few words."""
    parts = [about["kind"], f"at {about['length']:,}", about["how"], about.get("bounds")]
    parts += [f"eps {about['eps']:g}" if about.get("eps") else None]
    return " ".join(str(part) for part in parts if part)
