"""Make the needle model that comes with the package, and its view: python benchmarks/needle_model.py.

The model is trained by the recipe of `gape demo` to name the last of 8 needles in 128 tokens, with a floor of 16 under
its gates. Its view is of a text four times that long. Minutes on two cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from safetensors.torch import save

from gape.experiments.experiment import run_recipe
from gape.experiments.exploring import explored
from gape.experiments.open_model import open_run, read_run
from gape.experiments.recipe import load
from gape.explore.export import with_full_maps
from gape.explore.view import default_heads
from gape.utils import files

HOME = Path(__file__).parents[1] / "src" / "gape" / "explore" / "needle"
SETTINGS = [
    "model.position='p-rope+gape'", "seed=0", "task.target='last'", "model.options.gate_floor=16.0",
    "train.max_steps=500", "analysis.samples=1", "evaluation.samples=100",
]  # fmt: skip
LENGTH, HAYSTACK = 512, 0


def main(
    run: Annotated[Path | None, typer.Option(help="A run that is trained already; trains one by default.")] = None,
) -> None:
    """Train the model and write both files."""
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            recipe = load("niah/demo", SETTINGS)
            run_recipe(recipe, Path(folder))
            run = Path(folder) / recipe.runs[0].name
        opened, settings = open_run(run), read_run(run)
    HOME.mkdir(exist_ok=True)
    config = {"model": opened.model.config.to_dict(), "task": dict(vars(settings.task))}
    files.replace(HOME / "config.json", files.to_json(config))
    files.replace(HOME / "model.safetensors", save({k: v.contiguous() for k, v in opened.model.state_dict().items()}))
    exploration = explored(needle=LENGTH, seed=HAYSTACK, device="cpu")
    with_full_maps(exploration, default_heads(exploration.view.header)).save(HOME / "view.gz")
    for path in sorted(HOME.iterdir()):
        print(f"{path.name}: {files.size(path.stat().st_size)}")


if __name__ == "__main__":
    typer.run(main)
