"""What `gape hf perplexity` does: models of transformers measured at several contexts, rows kept beside them.

A run of `gape hf finetune` has its model in `model/` and its rows beside its manifest; a bare directory of a model gets
both itself. Rows are those of `gape lm perplexity`, and name the model that a run began with as their `base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import gape.hf
from gape.data import Corpus, open_corpus
from gape.experiments.experiment import pick_device, wants_bfloat16
from gape.experiments.finetune import refuse_corpus
from gape.experiments.open_model import (
    digest,
    load_transformers,
    model_home,
    refuse_length,
    tokenizer_of,
    transformers_identity,
    weights_of,
)
from gape.experiments.result_store import ResultStore
from gape.experiments.run import LanguageEvaluation
from gape.hf.reading import read_config
from gape.report.tables import Table
from gape.tasks import perplexity, perplexity_rows
from gape.utils import files, locks
from gape.utils.jsonl import Record
from gape.utils.progress import Progress, ProgressTable
from gape.utils.run_info import manifest
from gape.utils.validation import invalid_argument

ROWS, MANIFEST = "perplexity.jsonl", "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured of each model, and how."""

    corpus: Corpus
    evaluation: LanguageEvaluation
    plans: tuple[perplexity.Plan, ...]
    split: str
    device: torch.device
    low: bool

    @classmethod
    def of(cls, data: Path, evaluation: LanguageEvaluation, *, split: str, device: str, precision: str) -> Settings:
        """Lay the evaluation over a corpus.

        Raises:
            ValueError: no corpus, a context that no document fills, no such device.
        """
        corpus, target = open_corpus(data), pick_device(device)
        most, seed = evaluation.max_windows, evaluation.seed
        plans = tuple(
            perplexity.plan(corpus, evaluation.at(context), split=split, max_windows=most, seed=seed)
            for context in evaluation.contexts
        )
        low = wants_bfloat16(precision, target)
        return cls(corpus=corpus, evaluation=evaluation, plans=plans, split=split, device=target, low=low)

    def conditions(self) -> Record:
        """The values, besides the context's and the model's, that tell rows of one measurement from those of others."""
        return {
            "corpus": self.corpus.fingerprint(), "split": self.split, "only_stratum": None,
            "precision": "bfloat16" if self.low else "float32", "device": self.device.type,
            "max_windows": self.evaluation.max_windows, "eval_seed": self.evaluation.seed,
        }  # fmt: skip


def table(directories: Sequence[Path], settings: Settings, attention: str | None = None) -> Table:
    """Measure models at the contexts that have no row yet; perplexities by model and context.

    Raises:
        ValueError: a directory without a model, one of another tokenizer, or a context beyond learned positions.
    """
    for directory in directories:
        _refuse(directory, settings.corpus)
    rows = [_measured(directory, settings, attention) for directory in directories]
    header = ("Model", *(f"{context:,}" for context in settings.evaluation.contexts))
    return Table(title=f"Perplexity by context, {settings.evaluation.protocol}", header=header, rows=tuple(rows))


def _measured(directory: Path, settings: Settings, attention: str | None) -> tuple[str, ...]:
    """A row of the table."""
    with locks.locked(directory, "measured"):
        reader, cells, store = None, [str(directory)], ResultStore(directory / ROWS)
        about = settings.conditions() | {"weights": digest(directory), "attention": attention}
        for plan in settings.plans:
            values = about | {"plan": plan.identity()} | plan.protocol.settings()
            rows = store.rows(values)
            if not rows:
                reader = reader or _reader(directory, settings, attention)
                rows = _score(directory, reader, plan, settings, values)
                Progress().log(f"{directory} at {plan.protocol.context:,}: perplexity {rows[-1]['perplexity']:.2f}")
            # Here also where a death came between the rows and this.
            _scores(directory, plan).unlink(missing_ok=True)
            cells.append(f"{rows[-1]['perplexity']:.2f}")
        return tuple(cells)


def _score(
    directory: Path,
    reader: gape.hf.LanguageModel,
    plan: perplexity.Plan,
    settings: Settings,
    about: Record,
) -> list[Record]:
    """Score the windows of a plan and keep the rows."""
    scores, label = _scores(directory, plan), f"{directory} at {plan.protocol.context:,}"
    autocast = torch.autocast(settings.device.type, torch.bfloat16, enabled=settings.low)
    with ProgressTable(unit="window") as table, autocast:
        scored = perplexity_rows.score_all(
            reader, settings.corpus, plan, store=scores, of=repr(sorted(about.items(), key=str)),  # type: ignore[arg-type]
            chunk=settings.evaluation.chunk, progress=lambda done, total: table.show(label, done, total),
        )  # fmt: skip
    about = transformers_identity(directory, reader.config) | about
    rows = [about | row for row in perplexity_rows.rows(plan, scored, settings.evaluation.seed)]
    if not (directory / MANIFEST).is_file():
        more = {"precision": about["precision"], "transformers": version("transformers")}
        record = manifest(settings.device, seed=settings.evaluation.seed, data={"corpus": about["corpus"]}, more=more)
        files.replace(directory / MANIFEST, files.to_json(record))
    ResultStore(directory / ROWS).append(*rows)
    return rows


def _scores(directory: Path, plan: perplexity.Plan) -> Path:
    """The file of the scores until there are rows of them."""
    return directory / f".scores-{plan.protocol.context}.jsonl"


def _reader(directory: Path, settings: Settings, attention: str | None) -> gape.hf.LanguageModel:
    """A model that can read every context."""
    model = load_transformers(str(model_home(directory)), attention)
    for plan in settings.plans:
        refuse_length(model, plan.protocol.context)
    return gape.hf.LanguageModel(model.to(settings.device).eval())


def _refuse(directory: Path, corpus: Corpus) -> None:
    """Refuse what is no model, and one of another vocabulary or tokenizer than the corpus."""
    weights_of(directory)
    home = str(model_home(directory))
    refuse_corpus(home, read_config(home), corpus)
    known = tokenizer_of(directory)
    if known and known.get("sha256") != corpus.tokenizer.get("sha256"):
        wanted = f"a corpus of {known.get('name')}, the tokenizer that {directory} was trained with"
        raise invalid_argument("data", f"one of tokenizer {corpus.tokenizer.get('name')}", wanted)
