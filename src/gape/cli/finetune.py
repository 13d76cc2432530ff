"""What `gape hf` does: models read, changed, trained on windows of a corpus, measured and written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import gape.hf
from gape.cli import experiment
from gape.cli.console import Voice
from gape.data import Corpus, PrepareConfig, WindowSource, open_corpus, prepare
from gape.hf.gpt2 import extend_positions
from gape.hf.learn import freeze
from gape.hf.saving import Saved
from gape.hf.settings import LEARN
from gape.ops.checks import refuse
from gape.recipes.lm import Evaluation
from gape.report.results import read_lines
from gape.report.tables import Table
from gape.tasks import measured, perplexity
from gape.train import StopFlag, TrainConfig, Trainer, checkpoint, log

#: Files that make a tokenizer; a model is written with those it came with.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
CARD, MODEL, CORPUS, ROWS = "card.json", "model", "corpus", "perplexity.jsonl"
VALIDATION_WINDOWS = 64


def load(name: str) -> Any:
    """A causal language model, in float32; code that comes with it is never run.

    Raises:
        ValueError: there is none.
    """
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise refuse("model", name, "a directory that is there, or a name on the Hugging Face hub")
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except OSError as error:
        raise ValueError(f"model: {name!r} cannot be read: {error}") from error


def retrofit(
    name: str,
    out: Path,
    *,
    context_length: int | None,
    position: str | None,
    layers: Sequence[int] | None,
    start: str,
    seed: int,
    dry_run: bool,
    learned_positions: bool = False,
) -> None:
    """Put gates, or another scheme, into a model and save it."""
    _free(out)
    model = load(name)
    if learned_positions:
        if model.config.model_type != "gpt2":
            raise refuse(
                "model", model.config.model_type, "a GPT-2, which has learned positions; others: gape hf inject"
            )
        context_length = context_length or model.config.n_positions
    plan = gape.hf.plan(model, context_length=context_length, position=position, layers=layers, start=start)
    print(plan)
    if dry_run:
        return
    torch.manual_seed(seed)
    gape.hf.inject(model, context_length=context_length, position=position, layers=layers, start=start)
    save(model, name, out)


def strip(name: str, out: Path) -> None:
    """Take the gates out of a model and save it."""
    _free(out)
    save(gape.hf.remove(load(name)), name, out)


def lengthen(name: str, out: Path, length: int, *, dry_run: bool) -> None:
    """Give a GPT-2 more learned positions and save it."""
    _free(out)
    model = load(name)
    before = model.num_parameters()
    extend_positions(model, length)
    print(f"parameters   {model.num_parameters() - before:+,} beside {before:,}, {length:,} positions")
    if not dry_run:
        save(model, name, out)


def save(model: Any, name: str, out: Path) -> None:
    """Write a model with the tokenizer it came with."""
    model.save_pretrained(out)
    if Path(name).is_dir():
        for file in TOKENIZER:
            if (Path(name) / file).is_file():
                shutil.copyfile(Path(name) / file, out / file)
        return
    # A name on the hub: its files are wherever transformers keeps them.
    with contextlib.suppress(OSError, ValueError):
        transformers.AutoTokenizer.from_pretrained(name).save_pretrained(out)


def finetune(
    name: str,
    data: Sequence[str],
    out: Path,
    config: TrainConfig,
    *,
    length: int,
    batch_size: int,
    learn: str,
    device: str,
    resume: str,
    heldout_fraction: float,
    gradient_checkpointing: bool,
) -> Path:
    """Fine-tune a model in a run directory and save it to model/ in it.

    Returns:
        The directory of the model.

    Raises:
        Interrupted: a signal came; everything is saved.
        ValueError: a model or data that do not fit.
    """
    if learn not in LEARN:
        raise refuse("learn", learn, f"one of {', '.join(LEARN)}")
    voice, where = Voice(), experiment.pick_device(device)
    model = load(name)
    if learn != "all" and not isinstance(model, Saved):
        raise refuse("learn", learn, f"'all', since {name} has no gates")
    corpus = _corpus(name, data, out, heldout_fraction, voice)
    if corpus.vocab_size > model.config.vocab_size:
        raise refuse("data", f"{corpus.vocab_size} ids", f"at most the model's {model.config.vocab_size}")
    _refuse_length(model, length)
    freeze(model, learn)
    if gradient_checkpointing:
        # The other kind gives no gradients where the embedding is frozen.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = gape.hf.LanguageModel(model.to(where))
    source = WindowSource(
        corpus, length=length, batch_size=batch_size, seed=config.seed, device=where, accumulation=config.accumulation
    )
    with StopFlag() as stop:
        trainer = Trainer(
            wrapped, config, source, out, _validation(corpus, length, batch_size, where, stop, config), stop=stop,
            console=voice.console, extra={"base": name, "learn": learn, "tokenizer": corpus.tokenizer},
        )  # fmt: skip
        trainer.run(resume)
    chosen = checkpoint.resolve(out, voice.say)
    checkpoint.load_model_tensors(wrapped, chosen.model, chosen.state["aliases"])
    save(model.cpu(), name, out / MODEL)
    return out / MODEL


def perplexity_table(
    models: Sequence[Path], data: Path, evaluation: Evaluation, *, split: str, device: str, precision: str
) -> Table:
    """Measure models at the contexts that have no row yet; perplexities by model and context."""
    corpus, where, voice = open_corpus(data), experiment.pick_device(device), Voice()
    low = experiment.low_precision(precision, where)
    plans = [
        perplexity.plan(
            corpus, evaluation.at(context), split=split, max_windows=evaluation.max_windows, seed=evaluation.seed
        )
        for context in evaluation.contexts
    ]
    with StopFlag() as stop:
        rows = [_measured(model, corpus, plans, evaluation, where, low, stop, voice) for model in models]
    header = ("Model", *(f"{context:,}" for context in evaluation.contexts))
    return Table(title=f"Perplexity by context, {evaluation.protocol}", header=header, rows=tuple(rows))


def _measured(
    directory: Path,
    corpus: Corpus,
    plans: Sequence[perplexity.Plan],
    evaluation: Evaluation,
    device: torch.device,
    low: bool,
    stop: StopFlag,
    voice: Voice,
) -> tuple[str, ...]:
    """A row of the table."""
    model, cells = None, [str(directory)]
    of = {"corpus": corpus.fingerprint(), "precision": "bfloat16" if low else "float32", "weights": _weights(directory)}
    stored = read_lines(directory / ROWS) if (directory / ROWS).is_file() else []
    for plan in plans:
        about = of | {"plan": plan.identity()} | plan.protocol.settings()
        rows = [row for row in stored if all(row.get(key) == value for key, value in about.items())]
        if not rows:
            model = model or _reader(directory, plans, device)
            store = directory / f".scores-{plan.protocol.context}.jsonl"
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                scored = measured.score_all(
                    model, corpus, plan, store=store, of=str(sorted(of.items())), chunk=evaluation.chunk,  # type: ignore[arg-type]
                    check=stop.check,
                )  # fmt: skip
            rows = [about | row for row in measured.rows(plan, scored, evaluation.seed)]
            log.append(directory / ROWS, *rows)
            store.unlink()
            voice.say(f"{directory} at {plan.protocol.context:,}: perplexity {rows[-1]['perplexity']:.2f}")
        cells.append(f"{rows[-1]['perplexity']:.2f}")
    return tuple(cells)


def _reader(directory: Path, plans: Sequence[perplexity.Plan], device: torch.device) -> gape.hf.LanguageModel:
    """A model that can read every context that is asked for."""
    model = load(str(directory))
    for plan in plans:
        _refuse_length(model, plan.protocol.context)
    return gape.hf.LanguageModel(model.to(device).eval())


def _weights(directory: Path) -> list[list[Any]]:
    """What tells a directory's weights from others without reading them: names, sizes and times of the files."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"models: {directory} holds no safetensors file, expected a saved model")
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _validation(
    corpus: Corpus, length: int, batch_size: int, device: torch.device, stop: StopFlag, config: TrainConfig
) -> Any:
    """The loss on held-out windows, or None where there are none."""
    if not config.validate_every:
        return None
    try:
        held_out = WindowSource(corpus, split="heldout", length=length, batch_size=batch_size, device=device)
    except ValueError:
        return None
    batches = max(1, min(VALIDATION_WINDOWS, held_out.windows) // batch_size)

    def validate(model: Any, step: int) -> dict[str, float]:
        losses = []
        for number in range(1, batches + 1):
            stop.check()
            batch = held_out.batch(number, 0)
            losses.append(model.token_losses(model.hidden(batch.ids), batch.targets).double().mean())
        return {"loss": float(torch.stack(losses).mean())}

    return validate


def _corpus(name: str, data: Sequence[str], out: Path, heldout_fraction: float, voice: Voice) -> Corpus:
    """The prepared corpus, or one made of text with the model's own tokenizer."""
    if len(data) == 1 and (Path(data[0]) / CARD).is_file():
        return open_corpus(data[0])
    for given in data:
        if not given.startswith("hf:") and not Path(given).exists():
            raise refuse("data", given, "a corpus of gape data prepare, or files and folders of text")
    settings = PrepareConfig(inputs=tuple(data), tokenizer=name, heldout_fraction=heldout_fraction)
    prepare(settings, out / CORPUS, workers=1, say=voice.say)
    return open_corpus(out / CORPUS)


def _refuse_length(model: Any, length: int) -> None:
    """Refuse windows beyond what learned positions reach."""
    table = getattr(getattr(model, "transformer", None), "wpe", None)
    limit = getattr(table, "num_embeddings", None)
    if limit is not None and length > limit:
        raise refuse("length", length, f"at most {limit}, the model's learned positions; gape hf convert goes further")


def _free(out: Path) -> None:
    if (out / "config.json").exists():
        raise ValueError(f"out: {out} holds a model already, expected another directory")
