"""What `gape hf import`, `inject`, `remove` and `finetune` do: change models of transformers, train them."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

import gape.hf
from gape.data import (
    Corpus,
    PrepareConfig,
    RecallConfig,
    RecallSource,
    Tokenizer,
    WindowSource,
    load_tokenizer,
    open_corpus,
    prepare,
)
from gape.distributed import Job, processes
from gape.experiments.experiment import pick_device
from gape.experiments.open_model import MODEL, SETTINGS, base_of, describe, load_transformers, refuse_length
from gape.hf.adapters import add_lora
from gape.hf.card import write_card
from gape.hf.formats import MAGIC, read_gguf, read_llama2c
from gape.hf.gates import LEARN, freeze, has_gates
from gape.hf.reading import read
from gape.train import StopFlag, TrainConfig, Trainer, checkpoint, held_out_loss
from gape.train.resume import choose
from gape.utils import files, launch
from gape.utils.progress import Progress
from gape.utils.validation import invalid_argument, whole

#: Files that make a tokenizer; a model is written with those it came with.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
CARD, CORPUS, PART = "card.json", "corpus", ".part"
#: The key of floors in a file, as gates know them.
FLOORS = "gate_floor"
VALIDATION_WINDOWS, VALIDATION_TOKENS = 64, 262_144
#: Tokens that tell a corpus of another tokenizer.
_COMPARED = 512
#: Fewer tokens say nothing.
_LEAST_COMPARED = 32


def bring(file: Path, out: Path, tokenizer: Path | None) -> None:
    """Save a model of another format as transformers knows it, with its tokenizer."""
    _free(out)
    with file.open("rb") as opened:
        is_gguf = opened.read(len(MAGIC)) == MAGIC or file.suffix.lower() == ".gguf"
    if is_gguf and tokenizer is not None:
        raise invalid_argument("tokenizer", str(tokenizer), "nothing, since a GGUF file brings its own")
    model, own = read_gguf(file) if is_gguf else read_llama2c(file, tokenizer)
    _write(model, out, lambda part: None if own is None else own.save_pretrained(part))
    limit = model.config.max_position_embeddings
    print(f"{type(model).__name__}: {model.num_parameters():,} parameters, context {limit:,}, in {out}")


def retrofit(name: str, out: Path, *, seed: int, dry_run: bool, options: Mapping[str, Any], **settings: Any) -> None:
    """Put gates, or another scheme with options, into a model and save it; settings as :func:`gape.hf.inject`."""
    _free(out)
    whole("seed", seed, 0)
    model = load_transformers(name)
    settings |= options
    print(gape.hf.plan(model, **settings))
    if dry_run:
        return
    torch.manual_seed(seed)
    gape.hf.inject(model, **settings)
    # Runs say it in their rows; the directory that they begin with may be called after a scheme.
    model.config.gape_from = base_of(name)
    save(model, name, out)


def with_floors(gates: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Options of gates with the floors by layer and head of a file, such as the `plan.json` of `gape hf extend`."""
    if FLOORS in gates:
        raise invalid_argument("floors", str(path), f"none beside --gate {FLOORS}=…")
    try:
        rows = files.from_json(path.read_bytes()).get(FLOORS)
    except (OSError, ValueError) as error:
        raise ValueError(f"floors: {path} cannot be read, expected a JSON file with {FLOORS}: {error}") from error
    if not isinstance(rows, list):
        raise invalid_argument("floors", rows, f"lists of numbers by layer under {FLOORS} in {path}")
    return {**gates, FLOORS: rows}


def strip(name: str, out: Path) -> None:
    """Take the gates out of a model and save it."""
    _free(out)
    model = gape.hf.remove(load_transformers(name))
    vars(model.config).pop("gape_from", None)
    save(model, name, out)


def save(model: Any, name: str, out: Path) -> None:
    """Write a model with the tokenizer it came with."""

    def tokenizer(part: Path) -> None:
        if Path(name).is_dir():
            for file in TOKENIZER:
                if (Path(name) / file).is_file():
                    shutil.copyfile(Path(name) / file, part / file)
            return
        # A name on the hub: its files are wherever transformers keeps them.
        try:
            read(transformers.AutoTokenizer, name).save_pretrained(part)
        except (OSError, ValueError) as error:
            print(f"gape: {out} has no tokenizer: that of {name} cannot be loaded: {error}", file=sys.stderr)

    _write(model, out, tokenizer)


def _write(model: Any, out: Path, tokenizer: Callable[[Path], None]) -> None:
    """Write a model, and what `tokenizer` puts into a directory, to `out`; with config.json there, all of it is."""
    part = out / PART
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer(part)
    card = part / "README.md"
    if card.is_file():
        # Somebody else's README.md stays.
        card.unlink()
        write_card(out, model)
    for file in sorted(part.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(out / file.name)
    part.rmdir()


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
    attention: str | None = None,
    variant: str = "",
    recall: RecallConfig | None = None,
    lora: int = 0,
    kept: Sequence[Sequence[int]] = (),
    kept_share: float = 0.0,
) -> Path:
    """Fine-tune a model in a run directory, as `gape hf finetune`, and save it to model/ in it, whose path is returned.

    `kept` are other texts, as ids, that a share of the windows is filled with, so that a model stays what it was.

    Raises:
        Interrupted: a signal came; everything is saved.
        ValueError: a model or data that do not fit.
    """
    joined = processes.connect()
    progress, target, recall = Progress(), pick_device(device), recall or RecallConfig()
    # A corpus that is made of text is written: whatever can be refused before is.
    whole("batch_size", batch_size)
    if lora and learn != "all":
        raise invalid_argument("learn", learn, "'all' beside lora, whose matrices and the gates are all that learns")
    if recall.skip_to and config.context_parallel > 1:
        raise invalid_argument("skip_to", recall.skip_to, "0 under context_parallel, which counts positions itself")
    if resume != "auto":
        choose(out / "checkpoints", resume, progress.log)
    model = _learner(name, attention, learn, length, gradient_checkpointing=gradient_checkpointing)
    adapters = add_lora(model, lora, config.seed) if lora else None
    with removing_refused(out):
        corpus = corpus_of(name, data, out, heldout_fraction, progress)
        refuse_corpus(name, model.config, corpus)
        text = WindowSource(
            corpus, length=length, batch_size=batch_size, seed=config.seed, device=target,
            accumulation=config.accumulation,
        )  # fmt: skip
        source: WindowSource | RecallSource = text
        if recall.active or kept_share:
            source = RecallSource(text, load_tokenizer(name), recall, kept=kept, kept_share=kept_share)
    about = describe(model.config, name) | {"learn": learn}
    settings = {"kind": "hf", "name": out.name, "variant": variant, "seed": config.seed, "batch_size": batch_size}
    settings |= {"task": {"length": length}, "model": about, "train": config.to_dict()}
    if recall.active:
        settings["recall"] = dataclasses.asdict(recall)
    if lora:
        settings["lora"] = lora
    wrapped = gape.hf.LanguageModel(model.to(target))
    with StopFlag() as stop, processes.reported():
        trainer = Trainer(
            wrapped, config, source, out, _validation(text, progress, lambda: trainer.job, config), stop=stop,
            console=progress.console, extra={"base": name, "learn": learn, "tokenizer": text.corpus.tokenizer},
        )  # fmt: skip
        trainer.run(resume)

    def export() -> None:
        trained, tuner = model, adapters
        if trainer.job.size > 1:
            # This process may have no more than shards.
            trained = load_transformers(name, attention)
            tuner = add_lora(trained, lora, config.seed) if lora else None
        chosen = checkpoint.resolve(out, progress.log)
        checkpoint.load_model_tensors(gape.hf.LanguageModel(trained), chosen.model, chosen.state["aliases"])
        if tuner is not None:
            tuner.merge_and_unload()
        _note_loss(trained, chosen, length)
        save(trained.cpu(), name, out / MODEL)
        # Last: a run that has it is done.
        files.replace(out / SETTINGS, files.to_json(settings))

    processes.from_first(export)
    if joined:
        processes.leave()
    return out / MODEL


def _note_loss(model: Any, chosen: checkpoint.Checkpoint, length: int) -> None:
    """Leave the held-out loss of these weights for the model card; what others measured before they changed goes."""
    if not hasattr(model.config, "gape"):
        return
    notes = {name: value for name, value in model.config.gape.items() if name != "measured"}
    loss = (chosen.state["validation"] or {}).get("loss")
    if loss is not None and chosen.state["validated"] == chosen.step:
        notes["measured"] = {f"held-out loss, windows of {length:,} tokens": loss}
    model.config.gape = notes


@contextmanager
def removing_refused(out: Path) -> Iterator[None]:
    """Take away a corpus that is made of text in here, and then refused."""
    existed = (out / CORPUS).exists()
    try:
        yield
    except ValueError:
        if not existed and (out / CORPUS).exists() and launch.is_first():
            shutil.rmtree(out / CORPUS)
            if not any(out.iterdir()):
                out.rmdir()
        raise


def _learner(name: str, attention: str | None, learn: str, length: int, *, gradient_checkpointing: bool) -> Any:
    """A model of which as much learns as was asked for, if it can read windows of that length."""
    if learn not in LEARN:
        raise invalid_argument("learn", learn, f"one of {', '.join(LEARN)}")
    whole("length", length)
    model = load_transformers(name, attention)
    if learn != "all" and not has_gates(model):
        raise invalid_argument("learn", learn, f"'all', since {name} has no gates")
    refuse_length(model, length)
    # What learned when the model was saved says nothing here.
    for parameter in filter(torch.is_floating_point, model.parameters()):
        parameter.requires_grad_(True)
    freeze(model, learn)
    if gradient_checkpointing:
        checkpoint_gradients(model)
    return model


def checkpoint_gradients(model: Any) -> None:
    """Let a model compute activations again in the backward pass instead of keeping them."""
    # The other kind gives no gradients where the embedding is frozen.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _validation(training: WindowSource, progress: Progress, job: Callable[[], Job], config: TrainConfig) -> Any:
    """The loss on held-out windows like those of training, or None where there are none."""
    if not config.validate_every:
        return None
    try:
        held_out = WindowSource(
            training.corpus, split="heldout", length=training.length, batch_size=training.batch_size,
            device=training.device,
        )  # fmt: skip
    except ValueError as error:
        progress.log(f"nothing is validated: {error}")
        return None
    windows = min(VALIDATION_WINDOWS, max(1, VALIDATION_TOKENS // held_out.length), held_out.windows)
    batches = max(1, windows // held_out.batch_size)

    def validate(model: Any, step: int) -> dict[str, float]:
        return {"loss": held_out_loss(model, held_out, batches, job())}

    return validate


def corpus_of(name: str, data: Sequence[str], out: Path, heldout_fraction: float, progress: Progress) -> Corpus:
    """The prepared corpus, or one made of text with the model's own tokenizer."""
    if len(data) == 1 and (Path(data[0]) / CARD).is_file():
        return open_corpus(data[0])
    refuse_data(data)
    settings = PrepareConfig(inputs=tuple(data), tokenizer=name, heldout_fraction=heldout_fraction)
    processes.from_first(lambda: prepare(settings, out / CORPUS, log=progress.log) and None)
    return open_corpus(out / CORPUS)


def refuse_data(data: Sequence[str]) -> None:
    """Refuse paths where there is nothing."""
    for source in data:
        if not source.startswith("hf:") and not Path(source).exists():
            raise invalid_argument("data", source, "a corpus of gape data prepare, or files and folders of text")


def refuse_corpus(name: str, config: Any, corpus: Corpus) -> None:
    """Refuse a corpus with ids that a model does not know, or of another tokenizer than the model's.

    A model without a tokenizer is compared by the size of its vocabulary, which is often rounded up.
    """
    most = config.get_text_config().vocab_size
    if corpus.vocab_size > most:
        raise invalid_argument("data", f"{corpus.vocab_size} ids", f"at most the model's {most}")
    try:
        own = load_tokenizer(name)
    except ValueError:
        if 2 * corpus.vocab_size < most:
            raise invalid_argument("data", f"{corpus.vocab_size} ids", f"about the {most} of {name}") from None
        return
    if own.identity()["sha256"] != corpus.tokenizer.get("sha256") and not _makes(own, corpus):
        expected = f"a corpus of the tokenizer of {name}"
        raise invalid_argument("data", f"one of tokenizer {corpus.tokenizer.get('name')}", expected)


def _makes(tokenizer: Tokenizer, corpus: Corpus) -> bool:
    """Whether a tokenizer gives the ids of a corpus, whose own one may lie in other files."""
    compared = equal = 0
    end = corpus.tokenizer["end_of_text"] if corpus.card["end_of_text"] else None
    for document in corpus.documents(corpus.splits[0]):
        ids = [token for token in corpus.tokens(document, 0, min(document.length, _COMPARED)).tolist() if token != end]
        again = tokenizer.encode(tokenizer.decode(ids))
        # At both ends of a part of a text tokens may be others.
        equal += sum((Counter(ids) & Counter(again)).values())
        compared += len(ids)
        if compared >= _COMPARED:
            break
    # A few tokens may agree by chance.
    enough = compared >= _LEAST_COMPARED or tokenizer.vocab_size == corpus.vocab_size
    return enough and equal >= 0.9 * compared


def _free(out: Path) -> None:
    if (out / "config.json").exists():
        raise ValueError(f"out: {out} holds a model already, expected another directory")
