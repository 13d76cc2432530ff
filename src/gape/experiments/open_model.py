"""Trained models opened from a directory or by name: runs of ours, runs of `gape hf finetune`, models of transformers.

:func:`open_model` opens whatever is there. A run of `gape hf finetune` has its model in `model/`. Readers are models
with their tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gape.data import Tokenizer, load_tokenizer
from gape.experiments.run import Run
from gape.models.gpt import GPT
from gape.report.series import UNTRAINED
from gape.tasks.ruler.readers import TransformersReader
from gape.train import checkpoint
from gape.utils.files import file_sha256, sha256
from gape.utils.jsonl import Record, read_object
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.hf import LanguageModel


SETTINGS, SUMMARY, CONFIG, MODEL = "run.json", "summary.json", "config.json", "model"
#: The kind that `gape hf finetune` writes, and what the config of a saved model of transformers always has.
HF, MODEL_TYPE = "hf", "model_type"


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A trained model, a GPT of ours or one of transformers behind the same interface, read when it is first needed.

    Attributes:
        directory: where it lies, and where its rows go.
        identity: run, variant, position, seed, train_length and step, as every row has them.
        load: reads the model, in eval mode.
        run: the settings of a run of ours.
    """

    directory: Path
    identity: Record
    load: Callable[[], GPT | LanguageModel]
    run: Run | None = None

    @cached_property
    def model(self) -> Any:
        """The model."""
        return self.load()

    def accept(self, tokenizer: Mapping[str, Any]) -> None:
        """Refuse tokens of another tokenizer."""
        refuse_tokenizer(self.directory, tokenizer)
        most = self.model.config.vocab_size
        if tokenizer["vocab_size"] > most:
            expected = f"at most the {most} tokens of {self.directory}, not {tokenizer['vocab_size']}"
            raise invalid_argument("tokenizer", tokenizer.get("name"), expected)


def is_transformers(directory: Path) -> bool:
    """Whether a model of transformers lies in a directory, by itself or as a run; else it is a run of ours."""
    settings = read_object(directory / SETTINGS)
    if not settings and MODEL_TYPE not in read_object(directory / CONFIG):
        expected = "a directory that gape lm train, gape niah train, gape hf finetune or gape hf inject made"
        raise ValueError(f"model: got {str(directory)!r}, expected {expected}")
    return not settings or settings.get("kind") == HF


def open_model(
    directory: Path, device: str | torch.device = "cpu", log: Callable[[str], None] = print,
    *, attention: str | None = None,
) -> OpenModel:  # fmt: skip
    """Open whatever trained model lies in a directory: a run, or a saved model of transformers.

    `attention` is an `attn_implementation` in place of that of a model of transformers. A ValueError where there is no
    model or it cannot be read, a CheckpointError for a run without a valid checkpoint.
    """
    if not is_transformers(directory):
        return open_run(directory, device, log)
    from gape.hf import GapeForCausalLM, LanguageModel  # noqa: PLC0415
    from gape.hf.reading import read_config  # noqa: PLC0415

    home = str(model_home(directory))

    def load() -> GPT | LanguageModel:
        model = load_transformers(home, attention).to(device).eval()
        # A GPT of ours needs nothing of transformers to be measured.
        return model.gpt if isinstance(model, GapeForCausalLM) else LanguageModel(model)

    identity = _transformers_identity(directory, read_config(home)) | {"weights": _digest(directory)}
    return OpenModel(directory=directory, identity=identity, load=load)


def open_run(directory: Path, device: str | torch.device = "cpu", log: Callable[[str], None] = print) -> OpenModel:
    """Open the newest weights of a run of ours; a directory of checkpoints without settings does, too.

    A ValueError where there is none or its files are broken, a CheckpointError without a valid checkpoint.
    """
    if not directory.is_dir():
        raise ValueError(f"run: got {str(directory)!r}, expected a directory that gape lm train made")
    run = read_run(directory) if (directory / SETTINGS).is_file() else None
    chosen = checkpoint.resolve(directory, log)

    @cache
    def load() -> GPT:
        model: GPT = checkpoint.model_of(chosen, device=device)
        return model

    if run is None:
        config = load().config
        identity: Record = {
            "run": directory.resolve().name, "variant": "", "position": config.position, "seed": 0,
            "train_length": config.context_length,
        }  # fmt: skip
    else:
        identity = run.identity
    return OpenModel(directory=directory, identity=identity | {"step": chosen.step}, load=load, run=run)


def read_run(directory: Path, kind: str | None = None) -> Run:
    """The settings of the run that a directory holds; with a `kind` one of this kind with a checkpoint to measure.

    A ValueError where there is none, or not what `kind` asks for.
    """
    path = directory / SETTINGS
    settings = read_object(path)
    if not settings:
        expected = f"a directory with {SETTINGS}, as gape lm train and gape niah train make"
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
    """A causal language model, from a directory or the hub, or a ValueError; code that comes with it is never run.

    `attention` is an `attn_implementation` in place of the model's own. A file, and a path where there is nothing, are
    not looked up on the hub.
    """
    from gape.hf.reading import read_model  # noqa: PLC0415

    path = Path(name)
    if not path.is_dir() and (path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise invalid_argument("model", name, "a directory that is there, or a name on the Hugging Face hub")
    options = {} if attention is None else {"attn_implementation": attention}
    return read_model(name, dtype=dtype, **options)


def transformers_reader(
    name: str, *, device: torch.device | str = "cpu", low: bool = False, chunk: int = 16384
) -> TransformersReader:
    """The reader of a causal model of `transformers`, a folder or a name on the hub, with its own tokenizer.

    Code of the model's own is never run. With `low` its weights are read as bfloat16, else as float32. A ValueError
    where there is no such model, or its tokenizer lacks its files; an ImportError without `transformers`.
    """
    try:
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("models of transformers need it: pip install 'gape[hf]'") from error
    from gape.hf.reading import read  # noqa: PLC0415

    try:
        tokenizer = read(transformers.AutoTokenizer, name)
    except ValueError as error:
        raise ValueError(f"tokenizer: that of {name!r} cannot be loaded, are all its files there? {error}") from error
    if not tokenizer("The quick brown fox")["input_ids"]:
        raise ValueError(f"tokenizer: that of {name!r} makes no tokens of a text, expected its files to be whole")
    try:
        model = load_transformers(name, dtype=torch.bfloat16 if low else torch.float32)
    except ValueError as error:
        raise ValueError(f"model: got {name!r}, expected a run or a model of transformers: {error}") from error
    # Only the end of text: penalties for repetition and the like, which some models have, would not be greedy.
    model.generation_config = transformers.GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    path = Path(name)
    # gape hf finetune names the folder of every model "model".
    called = path.parent.name if path.name == MODEL and path.parent.name else path.name
    return TransformersReader(model.to(device).eval(), tokenizer, called, chunk=chunk)


def run_tokenizer(directory: Path, spec: str | None) -> Tokenizer:
    """The tokenizer of a run: the one that was named, if the run records it; None does for a run on bytes."""
    recorded = _recorded_tokenizer(directory)
    if spec is None and recorded.get("kind") != "bytes":
        name = f", {recorded['name']}" if recorded.get("name") else ""
        raise ValueError(f"tokenizer: got nothing, expected the one that {directory} was trained with{name}")
    tokenizer = load_tokenizer(spec or "bytes")
    refuse_tokenizer(directory, tokenizer.identity())
    return tokenizer


def refuse_tokenizer(directory: Path, tokenizer: Mapping[str, Any], *, recorded: bool = False) -> None:
    """Refuse tokens that mean something else than those a model was trained on."""
    known = _recorded_tokenizer(directory)
    if recorded and not known:
        raise ValueError(f"run: {directory} records no tokenizer, expected a run of gape lm train")
    if known and known["sha256"] != tokenizer.get("sha256"):
        expected = f"{known.get('name')}, the tokenizer that {directory} was trained with"
        raise invalid_argument("tokenizer", tokenizer.get("name"), expected)


def _recorded_tokenizer(directory: Path) -> Mapping[str, Any]:
    """The tokenizer that the settings of a model record; empty where they do not."""

    def search(settings: Any) -> Mapping[str, Any]:
        if not isinstance(settings, Mapping):
            return {}
        known = settings.get("tokenizer")
        if isinstance(known, Mapping) and "sha256" in known:
            return known
        return next((inner for value in settings.values() if (inner := search(value))), {})

    return search(read_object(directory / SETTINGS)) or search(read_object(directory / CONFIG))


def refuse_length(model: Any, length: int) -> None:
    """Refuse windows beyond what learned positions of a model of transformers reach."""
    table = getattr(getattr(getattr(model, "model", model), "transformer", None), "wpe", None)
    limit = getattr(table, "num_embeddings", None)
    if limit is not None and length > limit:
        expected = f"at most {limit}, the model's learned positions; gape hf inject --position goes further"
        raise invalid_argument("length", length, expected)


#: Rotations of transformers by the names they have here; others keep their own.
_NAMES = {"default": "rope", "linear": "pi", "dynamic": "ntk"}


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


def base_of(name: str) -> str:
    """What to call a model: the last word of its path or name."""
    return Path(name).resolve().name if Path(name).is_dir() else name.rpartition("/")[2]


def _transformers_identity(directory: Path, config: Any) -> Record:
    """What names a run, or a model that none of ours trained, in rows."""
    run, about = read_object(directory / SETTINGS), describe(config, str(directory))
    known = {"position": about["position"], "native": about["native"]}
    if run:
        own = {"run": run["name"], "variant": run["variant"], "seed": run["seed"], "base": run["model"]["base"]}
        step = read_object(directory / SUMMARY).get("step")
        return own | known | {"train_length": run["task"]["length"], "step": step}
    own = {"run": base_of(str(directory)), "variant": UNTRAINED, "seed": 0, "base": about["base"]}
    return own | known | {"train_length": None, "step": 0}


def model_home(directory: Path) -> Path:
    """Where the files of a model are: inside a run, or here."""
    return directory / MODEL if (directory / MODEL / CONFIG).is_file() else directory


def weights_of(directory: Path) -> list[Path]:
    """The files of a model's weights, in the order of their names."""
    paths = sorted(model_home(directory).glob("*.safetensors"))
    if not paths:
        expected = "a run of gape hf finetune, or a saved model in safetensors files"
        raise invalid_argument("models", str(directory), expected)
    return paths


def _digest(directory: Path) -> str:
    """SHA-256 of what a model is: of the hashes of its config, which says how it rotates, and of its weights."""
    paths = (model_home(directory) / CONFIG, *weights_of(directory))
    return sha256(b"".join(bytes.fromhex(file_sha256(path)) for path in paths))
