"""Experiments run from Python, without the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from pathlib import Path

from gape.experiments import needle, recipe, sweep

tiny = recipe.load(
    "niah/demo",
    ["task.length=32", "task.n_needles=2", "model.n_embd=16", "model.n_layer=1", "train.max_steps=2", "batch_size=2",
     "train.warmup_steps=0", "evaluation.samples=2", "evaluation.validation_samples=2", "evaluation.factors=[1, 2]",
     "analysis.samples=0", "model.position=nope+gape", "seed=[0]"],
)
result = sweep.run_recipe(tiny, Path("runs"))
print(result.done, [row["factor"] for row in needle.recipe_rows(tiny, Path("runs"))], "gape.cli" in sys.modules)
"""


def test_a_recipe_runs_without_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "['nope+gape_seed0'] [1, 2] False\n", done.stderr
