"""Trained models opened from a directory: runs of ours, runs of `gape hf finetune`, and saved models of transformers.

:func:`open_model` opens whatever is there. A run of `gape hf finetune` has its model in `model/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gape.experiments.run import Run
from gape.models.gpt import GPT
from gape.report.series import UNTRAINED
from gape.train import checkpoint
from gape.train.load import model_of
from gape.utils.jsonl import Record, read_object
from gape.utils.stored_rows import fault
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.hf import LanguageModel


SETTINGS, SUMMARY, CONFIG, MODEL = "run.json", "summary.json", "config.json", "model"
#: The kind that `gape hf finetune` writes, and what the config of a saved model of transformers always has.
HF, MODEL_TYPE = "hf", "model_type"
_MADE_BY = "a directory that gape lm train, gape niah train, gape hf finetune or gape hf inject made"


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A trained model with what rows say of it.

    Attributes:
        directory: where it lies, and where its rows go.
        identity: run, variant, position, seed, train_length and step, as every row has them.
        model: in eval mode: a GPT of ours, or a model of transformers behind the same interface.
        run: the settings of a run of ours; None for a model of transformers, and where it was opened without.
    """

    directory: Path
    identity: Record
    model: GPT | LanguageModel
    run: Run | None = None

    def accept(self, tokenizer: Mapping[str, Any]) -> None:
        """Refuse tokens of another tokenizer.

        Raises:
            ValueError: another tokenizer, or ids that the model has no embedding for.
        """
        refuse_tokenizer(self.directory, tokenizer)
        most = self.model.config.vocab_size
        if tokenizer["vocab_size"] > most:
            expected = f"at most the {most} tokens of {self.directory}, not {tokenizer['vocab_size']}"
            raise invalid_argument("tokenizer", tokenizer.get("name"), expected)


def kind_of(directory: Path) -> str:
    """What lies in a directory: a run, "lm" or "niah", or a model of transformers, "hf".

    Raises:
        ValueError: neither.
    """
    settings = read_object(directory / SETTINGS)
    if settings.get("kind") == HF or (not settings and MODEL_TYPE in read_object(directory / CONFIG)):
        return HF
    return read_run(directory, expected=_MADE_BY).kind


def open_model(
    directory: Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None,
    log: Callable[[str], None] = print,
) -> OpenModel:  # fmt: skip
    """Open whatever trained model lies in a directory: a run, or a saved model of transformers.

    `dtype` is that of its weights: as they were stored by default, float32 for models of transformers.

    Raises:
        ValueError: there is none, or it cannot be read.
        CheckpointError: a run without a valid checkpoint.
    """
    if kind_of(directory) == HF:
        return _open_transformers(directory, device, dtype or torch.float32)
    return open_run(directory, device, dtype, log, run=read_run(directory))


def open_run(
    directory: Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None,
    log: Callable[[str], None] = print, *, run: Run | None = None,
) -> OpenModel:  # fmt: skip
    """Open the newest weights of a run of ours; a directory of checkpoints without settings does, too.

    Raises:
        ValueError: there is no such directory, or its files are broken.
        CheckpointError: it holds no valid checkpoint.
    """
    if not directory.is_dir():
        raise ValueError(f"run: got {str(directory)!r}, expected a directory that gape lm train made")
    chosen = checkpoint.resolve(directory, log)
    model: GPT = model_of(chosen, device=device)
    if dtype is not None:
        model.to(dtype)
    settings = read_object(directory / SETTINGS)
    task = settings.get("task")
    identity = {
        "run": settings.get("name", directory.resolve().name), "variant": settings.get("variant", ""),
        "position": model.config.position, "seed": settings.get("seed", 0),
        "train_length": (task if isinstance(task, dict) else {}).get("length", model.config.context_length),
        "step": chosen.step,
    }  # fmt: skip
    if wrong := fault(identity):
        raise ValueError(f"{directory / SETTINGS}: {wrong}")
    return OpenModel(directory=directory, identity=identity, model=model, run=run)


def _open_transformers(directory: Path, device: str | torch.device, dtype: torch.dtype) -> OpenModel:
    from gape.hf import GapeForCausalLM, LanguageModel  # noqa: PLC0415

    model = load_transformers(str(model_home(directory)), dtype=dtype).to(device).eval()
    identity = transformers_identity(directory, model.config) | {"weights": digest(directory)}
    # A GPT of ours needs nothing of transformers to be measured.
    inner = model.gpt if isinstance(model, GapeForCausalLM) else LanguageModel(model)
    return OpenModel(directory=directory, identity=identity, model=inner)


def read_run(
    directory: Path, kind: str | None = None,
    expected: str = f"a directory with {SETTINGS}, as gape lm train and gape niah train make",
) -> Run:  # fmt: skip
    """The settings of the run that a directory holds; with a `kind` one of this kind with a checkpoint to measure.

    Raises:
        ValueError: there is none (then `expected` says what was), or not what `kind` asks for.
    """
    path = directory / SETTINGS
    settings = read_object(path)
    if not settings:
        raise ValueError(f"run: got {str(directory)!r}, expected {expected}")
    try:
        run = Run.from_dict(settings)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if kind not in (None, run.kind):
        raise ValueError(
            f"run: {str(directory)!r} was made by gape {run.kind} train, expected one of gape {kind} train"
        )
    if kind is not None and not checkpoint.available(directory / "checkpoints"):
        raise ValueError(f"run: got {str(directory)!r}, expected one with a checkpoint, as gape {kind} train leaves")
    return run


def load_transformers(name: str, attention: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model, from a directory or the hub; code that comes with it is never run.

    `attention` is an `attn_implementation` in place of the model's own.

    Raises:
        ValueError: there is none.
    """
    from gape.hf.reading import read_model  # noqa: PLC0415

    options = {} if attention is None else {"attn_implementation": attention}
    refuse_missing(name)
    return read_model(name, dtype=dtype, **options)


def refuse_missing(name: str) -> None:
    """Refuse a file, and a path where there is nothing: either would be looked up on the hub."""
    path = Path(name)
    if not path.is_dir() and (path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise invalid_argument("model", name, "a directory that is there, or a name on the Hugging Face hub")


def refuse_length(model: Any, length: int) -> None:
    """Refuse windows beyond what learned positions reach."""
    table = getattr(getattr(model, "transformer", None), "wpe", None)
    limit = getattr(table, "num_embeddings", None)
    if limit is not None and length > limit:
        raise invalid_argument(
            "length",
            length,
            f"at most {limit}, the model's learned positions; gape hf inject --position goes further",
        )


def describe(config: Any, name: str) -> dict[str, Any]:
    """What tables say of a model that was read from `name`: where it came from, its scheme, its own context."""
    gates = getattr(config, "gape", None) or {}
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = str(rotary.get("rope_type") or rotary.get("type") or "default")
    own = "learned" if config.model_type.endswith("gpt2") else _NAMES.get(kind, kind)
    # A GPT of ours says it as one of its sizes.
    position = gates.get("position") or getattr(config, "position", None) or (f"{own}+gape" if gates else own)
    options = {key: gates[key] for key in ("context_length", "start", "gates", "options", "layers") if gates.get(key)}
    base = getattr(config, "gape_from", base_of(name))
    native = gates.get("native") or getattr(config, "max_position_embeddings", None)
    return {"base": base, "position": position, "native": native, **options}


#: Rotations of transformers by the names they have here; others keep their own.
_NAMES = {"default": "rope", "linear": "pi", "dynamic": "ntk"}


def base_of(name: str) -> str:
    """What to call a model: the last word of its path or name."""
    return Path(name).resolve().name if Path(name).is_dir() else name.rpartition("/")[2]


def transformers_identity(directory: Path, config: Any) -> Record:
    """What names a run, or a model that none of ours trained, in rows."""
    run, about = read_object(directory / SETTINGS), describe(config, str(directory))
    known = {"position": about["position"], "native": about["native"]}
    if run:
        own = {"run": run["name"], "variant": run["variant"], "seed": run["seed"], "base": run["model"]["base"]}
        step = read_object(directory / SUMMARY).get("step")
        return own | known | {"train_length": run["task"]["length"], "step": step}
    own = {"run": base_of(str(directory)), "variant": UNTRAINED, "seed": 0, "base": about["base"]}
    return own | known | {"train_length": None, "step": 0}


def refuse_tokenizer(directory: Path, tokenizer: Mapping[str, Any], *, recorded: bool = False) -> None:
    """Refuse tokens that mean something else than those a model was trained on.

    With `recorded` a model that records no tokenizer is refused, too.

    Raises:
        ValueError: the model records another tokenizer.
    """
    known = _tokenizer(read_object(directory / SETTINGS)) or _tokenizer(read_object(directory / CONFIG))
    if recorded and not known:
        raise ValueError(f"run: {directory} records no tokenizer, expected a run of gape lm train")
    if known and known["sha256"] != tokenizer.get("sha256"):
        expected = f"{known.get('name')}, the tokenizer that {directory} was trained with"
        raise invalid_argument("tokenizer", tokenizer.get("name"), expected)


def model_home(directory: Path) -> Path:
    """Where the files of a model are: inside a run, or here."""
    return directory / MODEL if (directory / MODEL / CONFIG).is_file() else directory


def weights_of(directory: Path) -> list[Path]:
    """The files of a model's weights, in the order of their names.

    Raises:
        ValueError: there are none.
    """
    paths = sorted(model_home(directory).glob("*.safetensors"))
    if not paths:
        expected = "a run of gape hf finetune, or a saved model in safetensors files"
        raise invalid_argument("models", str(directory), expected)
    return paths


def digest(directory: Path) -> str:
    """SHA-256 of what a model is: of the hashes of its config, which says how it rotates, and of its weights.

    Raises:
        ValueError: there are none.
    """
    whole = hashlib.sha256()
    for path in (model_home(directory) / CONFIG, *weights_of(directory)):
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _tokenizer(settings: Any) -> Mapping[str, Any]:
    """The tokenizer that settings speak of, at whatever depth."""
    if not isinstance(settings, Mapping):
        return {}
    known = settings.get("tokenizer")
    if isinstance(known, Mapping) and "sha256" in known:
        return known
    return next((inner for value in settings.values() if (inner := _tokenizer(value))), {})
