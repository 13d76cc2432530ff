"""The model card that is written with every save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gape import __version__
from gape.hf.gates import RetrofitGates

#: A card with this line is ours and may be written anew.
MARK = "<!-- written by gape.hf -->"


def write_card(directory: Path, model: Any) -> Path:
    """Write the card: README.md, or GAPE.md where somebody else's README.md is.

    Returns:
        The file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "README.md"
    if path.is_file() and MARK not in path.read_text(encoding="utf-8"):
        path = directory / "GAPE.md"
    path.write_text(card(model), encoding="utf-8")
    return path


def card(model: Any) -> str:
    """The text: scheme, T, statistics of the gates, how to load."""
    config = model.config
    settings = getattr(config, "gape", None)
    told = (
        settings
        if isinstance(settings, dict)
        else {"position": config.position, "context_length": config.context_length}
    )
    base = getattr(type(model), "gape_base", type(model)).__name__
    scheme = told["position"] or "the model's own positions, with gates"
    lines = [
        "---", "library_name: gape", "pipeline_tag: text-generation", "tags: [gape, long-context]", "---", MARK, "",
        f"# {base} with Gated Adaptive Positional Encoding", "",
        "| | |", "|---|---|",
        f"| scheme | {scheme} |",
        f"| T, the training length | {told['context_length']} |",
        f"| layers | {'all' if told.get('layers') is None else told['layers']} |",
        f"| checksum of the gates | {told.get('checksum', '–')} |",
        f"| written by | gape {__version__} |", "",
    ]  # fmt: skip
    rows = _statistics(model)
    if rows:
        lines += ["## Gates", "", "| layer | Γ, mean | Γ, range | b_g, mean | b_l, mean |", "|---:|---:|---|---:|---:|"]
        lines += [*rows, ""]
    lines += ["## Loading", "", "```python", *_loading(model), "```", ""]
    return "\n".join(lines)


def _loading(model: Any) -> list[str]:
    return [
        "import gape.hf  # knows this model type",
        "from transformers import AutoModelForCausalLM",
        "",
        'model = AutoModelForCausalLM.from_pretrained("this directory")',
    ]


def _statistics(model: Any) -> list[str]:
    """A row of the table for each layer with gates."""
    rows = []
    for number, (name, gates) in enumerate(_all_gates(model)):
        amplitude = gates.amplitude.detach().float().cpu()
        biases = [
            "fixed" if projection is None else f"{projection.bias.detach().float().mean():.3f}"
            for projection in (gates.gate_projection, gates.landmark_projection)
        ]
        layer = next((part for part in name.split(".") if part.isdigit()), str(number))
        between = f"{amplitude.min():.3g} … {amplitude.max():.3g}"
        rows.append(f"| {layer} | {amplitude.mean():.3g} | {between} | {' | '.join(biases)} |")
    return rows


@torch.no_grad()
def _all_gates(model: Any) -> list[tuple[str, Any]]:
    from gape.gates import GAPEGates  # noqa: PLC0415

    return [(name, module) for name, module in model.named_modules() if isinstance(module, (RetrofitGates, GAPEGates))]
