"""Experiments run from Python, without the command line."""

from __future__ import annotations

from pathlib import Path

from gape.experiments import experiment, needle, recipe

TINY = [
    "task.length=32", "task.n_needles=2", "model.n_embd=16", "model.n_layer=1", "train.max_steps=2", "batch_size=2",
    "train.warmup_steps=0", "evaluation.samples=2", "evaluation.validation_samples=2", "evaluation.factors=[1, 2]",
    "analysis.samples=0", "model.position=nope+gape", "seed=[0]",
]  # fmt: skip


def test_a_recipe_runs_without_the_command_line(tmp_path: Path) -> None:
    """That nothing here imports `gape.cli` is a contract of `make lint`."""
    tiny = recipe.load("niah/demo", TINY)
    assert experiment.run_recipe(tiny, tmp_path) == {}
    assert [row["factor"] for row in needle.recipe_rows(tiny, tmp_path)] == [1, 2]
