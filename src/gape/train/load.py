"""Trained models back from disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from gape.models import GPT, GPTConfig
from gape.train import checkpoint
from gape.train.checkpoint import CheckpointError
from gape.train.optimizer import bare

_LOGGER = logging.getLogger(__name__)


def load_model(
    path: str | PathLike[str],
    *,
    device: str | torch.device = "cpu",
    build: Callable[[Mapping[str, Any]], nn.Module] | None = None,
    warn: Callable[[str], None] = _LOGGER.warning,
) -> Any:
    """The model of a checkpoint, in eval mode. Its config comes from the checkpoint; the seal is verified first.

    Its tensors have the dtypes they were trained in, whatever `build` makes.

    Args:
        path: a checkpoint, or a run directory: its best checkpoint (`patience`), else its newest valid one.
        device: of the model.
        build: makes an untrained model from the stored config; :class:`gape.GPT` when None.
        warn: called with the reason when a broken checkpoint is passed over; logs a warning by default.

    Raises:
        CheckpointError: when nothing valid is there, or it is of another model.
    """
    return model_of(checkpoint.resolve(path, warn), device=device, build=build)


def model_of(
    chosen: checkpoint.Checkpoint,
    *,
    device: str | torch.device = "cpu",
    build: Callable[[Mapping[str, Any]], nn.Module] | None = None,
) -> Any:
    """The model of a checkpoint that was read already; arguments and errors as in :func:`load_model`."""
    stored = chosen.state["model"]
    if build is None:
        if stored["class"] != "GPT":
            raise CheckpointError(f"{chosen.path} holds a {stored['class']}; say how to make one with build=")
        build = _gpt
    try:
        model = build(stored["config"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{chosen.path / checkpoint.STATE} describes no model: {error}") from error
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (saved := chosen.model.get(chosen.state["aliases"].get(bare(name), bare(name)))) is not None:
            tensor.data = tensor.data.to(saved.dtype)
    checkpoint.load_model_tensors(model, chosen.model, chosen.state["aliases"])
    return model.to(device).eval()


def _gpt(config: Mapping[str, Any]) -> nn.Module:
    return GPT(GPTConfig.from_dict(config))
