"""A process of its own that loads what another one saved: child.py DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import gape.hf  # noqa: F401


def main(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids, actual = torch.load(directory / "ids.pt", weights_only=True), {}
    for place in sorted(path for path in directory.iterdir() if path.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(place).eval()
        with torch.no_grad():
            actual[place.name] = model(ids).logits
    torch.save(actual, directory / "logits.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
