"""What `gape forget` measures: runs of ours, runs of `gape hf finetune`, and directories of models with gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from gape.analysis.passages import Reader
from gape.analysis.runs import Trained, open_run
from gape.analysis.tap import attended
from gape.cache.kv import ForgettingCache
from gape.experiments.experiment import SETTINGS, Say, asked_precision, described
from gape.experiments.run import Run
from gape.models.gpt import GPT
from gape.ops.inputs import Problem
from gape.utils.jsonl import read_object
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.hf import LanguageModel

#: The kind that `gape hf finetune` writes, and what the config of a saved model of transformers always has.
HF, MODEL_TYPE = "hf", "model_type"


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
    def asked(name: str, device: torch.device) -> Precision:
        """What a name means on a device.

        Raises:
            ValueError: no such precision.
        """
        if name == SERVED:
            return Precision(name, autocast=False, weights=torch.bfloat16)
        low = asked_precision(name, device, SERVED)
        return Precision("bfloat16" if low else "float32", autocast=low, weights=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A language model as it is measured: a GPT of ours, or one of transformers behind the same interface.

    Attributes:
        model: in eval mode.
        impl: the implementation that its attention runs dense.
        attended: ids (B, N) → what each layer with gates attends with.
        full_cache: tokens to make room for → an empty cache that keeps everything.
        forgetting_cache: called as :class:`gape.cache.kv.ForgettingCache` is, without the model.
        check: refuses, with a ValueError, a model that cannot be measured on texts of so many tokens.
    """

    model: GPT | LanguageModel
    impl: str
    attended: Callable[[Tensor], list[Problem]]
    full_cache: Callable[[int], Any]
    forgetting_cache: Callable[..., Any]
    check: Callable[[int], None]


def subject(model: GPT) -> Subject:
    """A GPT as it is measured."""
    width = next(model.blocks()).attention.head_dim

    def problems(ids: Tensor) -> list[Problem]:
        found = (layer.problem(0, layer.seen.n_q) for layer in attended(model, ids, logits_to_keep=1))
        return [replace(problem, v=problem.k.new_empty(*problem.k.shape[:3], width)) for problem in found]

    def check(longest: int) -> None:
        if next(model.gates(), None) is None:
            raise invalid_argument("run", model.config.position, "a scheme with gates, which alone forgets")

    return Subject(
        model=model, impl=model.config.impl, attended=problems, check=check,
        full_cache=model.new_cache, forgetting_cache=partial(ForgettingCache, model),
    )  # fmt: skip


class Opened(NamedTuple):
    """A trained model: what names it, as it is measured, and the settings of its run, if it is one of ours."""

    trained: Trained
    subject: Subject
    run: Run | None


def kind_of(directory: Path) -> str:
    """What lies in a directory: a run, "lm" or "niah", or a model of transformers, "hf".

    Raises:
        ValueError: neither.
    """
    settings = read_object(directory / SETTINGS)
    if settings.get("kind") == HF or (not settings and MODEL_TYPE in read_object(directory / "config.json")):
        return HF
    return _run(directory).kind


def corpus(runs: list[Path], data: Path | None) -> Reader | None:
    """The corpus that language models among the runs read; None where there is none.

    Raises:
        ValueError: a directory without a run or a model, or no corpus for a language model.
    """
    for directory in runs:
        if kind_of(directory) != "niah" and data is None:
            raise ValueError(f"data: got nothing, expected --data CORPUS for the language model in {directory}")
    if data is None:
        return None
    if not data.is_dir():
        raise ValueError(f"data: got {str(data)!r}, expected a corpus that gape data prepare wrote")
    return Reader(data)


def opened(directory: Path, device: torch.device, weights: torch.dtype, say: Say) -> Opened:
    """Load what lies in a directory, in eval mode, with its weights in some dtype.

    Raises:
        ValueError: it cannot be read.
        CheckpointError: a run without a valid checkpoint.
    """
    return _OPENERS[kind_of(directory)](directory, device, weights, say)


def _ours(directory: Path, device: torch.device, weights: torch.dtype, say: Say) -> Opened:
    trained = open_run(directory, device, say)
    trained.model.to(weights)
    return Opened(trained, subject(trained.model), _run(directory))


def _run(directory: Path) -> Run:
    wanted = "a directory that gape lm train, gape niah train, gape hf finetune or gape hf inject made"
    return described(directory, wanted)


def _of_transformers(directory: Path, device: torch.device, weights: torch.dtype, say: Say) -> Opened:
    from gape.experiments import hf_perplexity  # noqa: PLC0415
    from gape.experiments.finetune import load  # noqa: PLC0415
    from gape.hf import GapeForCausalLM, LanguageModel  # noqa: PLC0415

    model = load(str(hf_perplexity.model_home(directory)), dtype=weights).to(device).eval()
    identity = hf_perplexity.identity(directory, model.config) | {"weights": hf_perplexity.digest(directory)}
    # A GPT of ours needs nothing of transformers to be measured.
    found = subject(model.gpt) if isinstance(model, GapeForCausalLM) else _injected(LanguageModel(model))
    trained = Trained(
        directory=directory, identity=identity, model=cast(GPT, found.model),
        tokenizer=hf_perplexity.tokenizer_of(directory),
    )  # fmt: skip
    return Opened(trained, found, None)


def _injected(model: LanguageModel) -> Subject:
    """A model that gates were put into, as it is measured."""
    from gape import hf  # noqa: PLC0415
    from gape.experiments.finetune import refuse_length  # noqa: PLC0415
    from gape.hf import attend, listening  # noqa: PLC0415
    from gape.hf.keeping import can_keep  # noqa: PLC0415

    def check(longest: int) -> None:
        listening.gated_layers(model.model)
        refuse_length(model.model, longest)

    def full_cache(capacity: int) -> Any:
        # That of transformers takes layers without gates, and attention that has no use for keys with a bias.
        return hf.KeepingCache(model.model, capacity) if can_keep(model.model) else model.new_cache(capacity)

    return Subject(
        model=model, impl=attend.KNOWN[attend.our_name(model.config._attn_implementation)], check=check,
        attended=partial(listening.attended, model), full_cache=full_cache,
        forgetting_cache=partial(hf.ForgettingCache, model.model, carried=True),
    )  # fmt: skip


_OPENERS: dict[str, Callable[[Path, torch.device, torch.dtype, Say], Opened]] = {
    "lm": _ours,
    "niah": _ours,
    HF: _of_transformers,
}
