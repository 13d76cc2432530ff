"""Experiments that can be run from Python: recipes, runs, sweeps and measurements of trained models."""
