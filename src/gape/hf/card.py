"""Model cards: README.md of a saved model, with the fields that the hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gape import __version__
from gape.gates import GAPEGates
from gape.utils import files

#: A card with this line was written here and may be overwritten.
MARK = "<!-- written by gape.hf -->"
#: Names of models on the hub.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
#: Fields at the top of a card, between two lines of ---.
_FIELDS = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def origin(config: Any) -> dict[str, str]:
    """What a config tells of its model's origin: "base_model", its name, and "license", each if known; offline.

    The licence is that of the card in its directory.
    """
    name = str(getattr(config, "_name_or_path", "") or "")
    fields: dict[str, str] = {}
    if Path(name).is_dir() and name:
        fields = {key: value for key, value in _card_fields(Path(name)).items() if key in ("base_model", "license")}
        fields.setdefault("base_model", Path(name).resolve().name)
    elif name:
        fields["base_model"] = name
    return fields


def _card_fields(directory: Path) -> dict[str, str]:
    """The fields of a directory's card that have one word each."""
    path = directory / "README.md"
    try:
        match = _FIELDS.match(path.read_text(encoding="utf-8").replace("\r\n", "\n"))
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = re.findall(r"^(\w+): *['\"]?([\w./-]+)['\"]?$", match[1] if match else "", re.MULTILINE)
    return dict(pairs)


def write_card(directory: Path, model: Any) -> Path:
    """Write the model card: README.md, or GAPE.md where somebody else's README.md is. Returns the file.

    `model.config.gape` may hold "license", "base_model" and "measured", a dictionary of words and numbers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "README.md"
    if path.is_file() and MARK not in path.read_text(encoding="utf-8"):
        path = directory / "GAPE.md"
    files.replace(path, _card(model).encode())
    return path


def _card(model: Any) -> str:
    """The text: fields of the hub, how to load, what it is, what was measured, statistics of the gates."""
    config = model.config
    notes = getattr(config, "gape", None)
    if not isinstance(notes, dict):
        notes = {"position": config.position, "context_length": config.context_length}
    family = getattr(type(model), "gape_base", type(model)).__name__
    base, context = notes.get("base_model"), getattr(config, "max_position_embeddings", None)
    lines = ["---"]
    if _HUB_NAME.fullmatch(str(base or "")):
        lines += [f"base_model: {base}", "base_model_relation: finetune"]
    lines += [f"license: {notes.get('license') or 'unknown'}", "library_name: transformers"]
    lines += ["pipeline_tag: text-generation", "tags:", "- gape", "- long-context", "---"]
    lines += [MARK, "", f"# {base or family} with Gated Adaptive Positional Encoding", ""]
    lines += [
        "```", "pip install 'gape[hf]'", "```", "", "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer", "", 'name = "this directory"',
        "model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)  # or: import gape.hf, no flag",
        "tokenizer = AutoTokenizer.from_pretrained(name)", "```", "",
        "| | |", "|---|---|",
        f"| architecture | {family} |",
        f"| base model | {base or 'none'} |",
        f"| positions | {notes['position'] or 'those of the base model, with gates'} |",
        f"| context length | {'not in the config' if context is None else f'{context:,}'} |",
        f"| T, the training length | {notes['context_length']:,} |",
        f"| layers with gates | {'all' if notes.get('layers') is None else notes['layers']} |",
        f"| checksum of the gates | {notes.get('checksum') or getattr(config, 'gate_checksum', None) or '–'} |",
        f"| written by | gape {__version__} |", "", "## Measured", "", *_measured(notes.get("measured")),
    ]  # fmt: skip
    rows = _gate_rows(model)
    if rows:
        lines += ["", "<details><summary>Gates by layer</summary>", ""]
        lines += ["| layer | Γ, mean | Γ, range | b_g, mean | b_l, mean |", "|---:|---:|---|---:|---:|"]
        lines += [*rows, "", "</details>"]
    return "\n".join([*lines, ""])


def _measured(measured: Mapping[str, Any] | None) -> list[str]:
    if not measured:
        return ["Nothing yet."]
    values = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in measured.items())
    return ["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in values)]


def _gate_rows(model: Any) -> list[str]:
    """A row of the card's table for each layer with gates."""
    rows = []
    gates = [(name, module) for name, module in model.named_modules() if isinstance(module, GAPEGates)]
    for number, (name, module) in enumerate(gates):
        amplitude = module.amplitude.detach().float().cpu()
        biases = [
            "fixed" if projection is None else f"{projection.bias.detach().float().mean():.3f}"
            for projection in (module.gate_projection, module.landmark_projection)
        ]
        layer = next((part for part in name.split(".") if part.isdigit()), str(number))
        between = f"{amplitude.min():.3g} … {amplitude.max():.3g}"
        rows.append(f"| {layer} | {amplitude.mean():.3g} | {between} | {' | '.join(biases)} |")
    return rows
