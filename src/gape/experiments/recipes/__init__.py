"""Experiments as TOML files: read, checked key by key, overridden from the command line, expanded into runs.

A recipe has a `kind` ("niah" where it says none, or "lm"), the sections `task`, `model`, `train`, `evaluation` and
`analysis`, a `sweep` whose lists are multiplied out, and `variants`, named sets of settings that each run through the
sweep. Nothing in a file is ever executed.
"""

from gape.experiments.recipes.lm import LanguageRun
from gape.experiments.recipes.load import Recipe, available, find, load
from gape.experiments.recipes.niah import NeedleRun
from gape.experiments.recipes.run import Run

__all__ = ["LanguageRun", "NeedleRun", "Recipe", "Run", "available", "find", "load"]
