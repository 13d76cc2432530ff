"""What `gape hf perplexity` does: models of transformers measured at several contexts, rows kept beside them.

A run of `gape hf finetune` has its model in `model/` and its rows beside its manifest; a bare directory of a model gets
both itself. Rows are those of `gape lm perplexity`, and name the model that a run began with as their `base`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import gape.hf
from gape.data import Corpus, open_corpus
from gape.experiments import experiment
from gape.experiments.experiment import Record
from gape.experiments.finetune import MODEL, RUN, base_of, described, load, refuse_corpus, refuse_length
from gape.experiments.run import LanguageEvaluation
from gape.hf.reading import read_config
from gape.report.hf import UNTRAINED
from gape.report.results import read_rows
from gape.report.tables import Table
from gape.tasks import perplexity, perplexity_rows
from gape.utils import files, jsonl, locks
from gape.utils.jsonl import read_object
from gape.utils.progress import Board, Voice
from gape.utils.run_info import manifest
from gape.utils.validation import invalid_argument

ROWS, MANIFEST = "perplexity.jsonl", "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What models are asked."""

    corpus: Corpus
    evaluation: LanguageEvaluation
    plans: tuple[perplexity.Plan, ...]
    split: str
    device: torch.device
    low: bool

    @classmethod
    def of(cls, data: Path, evaluation: LanguageEvaluation, *, split: str, device: str, precision: str) -> Asked:
        """Lay the evaluation over a corpus.

        Raises:
            ValueError: no corpus, a context that no document fills, no such device.
        """
        corpus, where = open_corpus(data), experiment.pick_device(device)
        most, seed = evaluation.max_windows, evaluation.seed
        plans = tuple(
            perplexity.plan(corpus, evaluation.at(context), split=split, max_windows=most, seed=seed)
            for context in evaluation.contexts
        )
        low = experiment.asked_precision(precision, where)
        return cls(corpus=corpus, evaluation=evaluation, plans=plans, split=split, device=where, low=low)

    def question(self) -> Record:
        """What tells stored rows of this question from others, but for the context and the model."""
        return {
            "corpus": self.corpus.fingerprint(), "split": self.split, "only_stratum": None,
            "precision": "bfloat16" if self.low else "float32", "device": self.device.type,
            "max_windows": self.evaluation.max_windows, "eval_seed": self.evaluation.seed,
        }  # fmt: skip


def table(directories: Sequence[Path], asked: Asked, attention: str | None = None) -> Table:
    """Measure models at the contexts that have no row yet; perplexities by model and context.

    Raises:
        ValueError: a directory without a model, one of another tokenizer, or a context beyond learned positions.
    """
    for directory in directories:
        _refuse(directory, asked.corpus)
    rows = [_measured(directory, asked, attention) for directory in directories]
    header = ("Model", *(f"{context:,}" for context in asked.evaluation.contexts))
    return Table(title=f"Perplexity by context, {asked.evaluation.protocol}", header=header, rows=tuple(rows))


def _measured(directory: Path, asked: Asked, attention: str | None) -> tuple[str, ...]:
    """A row of the table."""
    with locks.locked(directory, "measured"):
        reader, cells, voice = None, [str(directory)], Voice()
        about = asked.question() | {"weights": digest(directory), "attention": attention}
        stored = read_rows(directory / ROWS) if (directory / ROWS).is_file() else []
        for plan in asked.plans:
            wanted = about | {"plan": plan.identity()} | plan.protocol.settings()
            rows = [row for row in stored if experiment.answers(row, wanted)]
            if not rows:
                reader = reader or _reader(directory, asked, attention)
                rows = _score(directory, reader, plan, asked, wanted)
                voice.say(f"{directory} at {plan.protocol.context:,}: perplexity {rows[-1]['perplexity']:.2f}")
            # Here also where a death came between the rows and this.
            _store(directory, plan).unlink(missing_ok=True)
            cells.append(f"{rows[-1]['perplexity']:.2f}")
        return tuple(cells)


def _score(
    directory: Path,
    reader: gape.hf.LanguageModel,
    plan: perplexity.Plan,
    asked: Asked,
    about: Record,
) -> list[Record]:
    """Score the windows of a plan and keep the rows."""
    store, label = _store(directory, plan), f"{directory} at {plan.protocol.context:,}"
    with Board(Voice(), "window") as board, torch.autocast(asked.device.type, torch.bfloat16, enabled=asked.low):
        scored = perplexity_rows.score_all(
            reader, asked.corpus, plan, store=store, of=repr(sorted(about.items(), key=str)),  # type: ignore[arg-type]
            chunk=asked.evaluation.chunk, progress=lambda done, total: board.show(label, done, total),
        )  # fmt: skip
    about = identity(directory, reader.config) | about
    rows = [about | row for row in perplexity_rows.rows(plan, scored, asked.evaluation.seed)]
    if not (directory / MANIFEST).is_file():
        more = {"precision": about["precision"], "transformers": version("transformers")}
        record = manifest(asked.device, seed=asked.evaluation.seed, data={"corpus": about["corpus"]}, more=more)
        files.replace(directory / MANIFEST, files.to_json(record))
    jsonl.append(directory / ROWS, *rows)
    return rows


def _store(directory: Path, plan: perplexity.Plan) -> Path:
    """Where scores are until there are rows of them."""
    return directory / f".scores-{plan.protocol.context}.jsonl"


def identity(directory: Path, config: Any) -> Record:
    """What names a run, or a model that none of ours trained, in rows."""
    run, told = read_object(directory / RUN), described(config, str(directory))
    known = {"position": told["position"], "native": told["native"]}
    if run:
        own = {"run": run["name"], "variant": run["variant"], "seed": run["seed"], "base": run["model"]["base"]}
        step = read_object(directory / experiment.SUMMARY).get("step")
        return own | known | {"train_length": run["task"]["length"], "step": step}
    own = {"run": base_of(str(directory)), "variant": UNTRAINED, "seed": 0, "base": told["base"]}
    return own | known | {"train_length": None, "step": 0}


def _reader(directory: Path, asked: Asked, attention: str | None) -> gape.hf.LanguageModel:
    """A model that can read every context that is asked for."""
    model = load(str(model_home(directory)), attention)
    for plan in asked.plans:
        refuse_length(model, plan.protocol.context)
    return gape.hf.LanguageModel(model.to(asked.device).eval())


def _refuse(directory: Path, corpus: Corpus) -> None:
    """Refuse what is no model, and one of another vocabulary or tokenizer than the corpus."""
    weights_of(directory)
    home = str(model_home(directory))
    refuse_corpus(home, read_config(home), corpus)
    known = tokenizer_of(directory)
    if known and known.get("sha256") != corpus.tokenizer.get("sha256"):
        wanted = f"a corpus of {known.get('name')}, the tokenizer that {directory} was trained with"
        raise invalid_argument("data", f"one of tokenizer {corpus.tokenizer.get('name')}", wanted)


def tokenizer_of(directory: Path) -> Record:
    """What identifies the tokenizer that a run was fine-tuned with; empty for a model that none of ours trained."""
    found: Record = read_object(directory / "config.json").get("extra", {}).get("tokenizer") or {}
    return found


def model_home(directory: Path) -> Path:
    """Where the files of a model are: inside a run, or here."""
    return directory / MODEL if (directory / MODEL / "config.json").is_file() else directory


def weights_of(directory: Path) -> list[Path]:
    """The files of a model's weights, in the order of their names.

    Raises:
        ValueError: there are none.
    """
    found = sorted(model_home(directory).glob("*.safetensors"))
    if not found:
        raise invalid_argument(
            "models", str(directory), "a run of gape hf finetune, or a saved model in safetensors files"
        )
    return found


def digest(directory: Path) -> str:
    """SHA-256 of what a model is: of the hashes of its config, which says how it rotates, and of its weights.

    Raises:
        ValueError: there are none.
    """
    whole = hashlib.sha256()
    for path in (model_home(directory) / "config.json", *weights_of(directory)):
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
