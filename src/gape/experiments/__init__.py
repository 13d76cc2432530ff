"""Experiments that can be run from Python: recipes, runs, sweeps and measurements of trained models."""

from pathlib import Path

#: Where runs go by default.
RUNS = Path("runs")
