"""Trained models back from disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from os import PathLike

import torch

from gape.models import GPT, GPTConfig
from gape.train import checkpoint
from gape.train.checkpoint import CheckpointError
from gape.train.optimizer import bare

_LOGGER = logging.getLogger(__name__)


def load_model(
    path: str | PathLike[str], *, device: str | torch.device = "cpu", warn: Callable[[str], None] = _LOGGER.warning
) -> GPT:
    """The model of a checkpoint, in eval mode, in the dtypes it was trained in; the seal is verified first.

    Args:
        path: a checkpoint, or a run directory: its best checkpoint (`patience`), else its newest valid one.
        device: of the model.
        warn: called with the reason when a broken checkpoint is passed over; logs a warning by default.

    Raises:
        CheckpointError: when nothing valid is there, or it is of another model.
    """
    return model_of(checkpoint.resolve(path, warn), device=device)


def model_of(chosen: checkpoint.Checkpoint, *, device: str | torch.device = "cpu") -> GPT:
    """The model of a checkpoint that was read already, as :func:`load_model`."""
    stored = chosen.state["model"]
    if stored["class"] != "GPT":
        raise CheckpointError(f"{chosen.path} holds a {stored['class']}, expected a GPT")
    try:
        model = GPT(GPTConfig.from_dict(stored["config"]))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{chosen.path / checkpoint.STATE} describes no model: {error}") from error
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (saved := chosen.model.get(chosen.state["aliases"].get(bare(name), bare(name)))) is not None:
            tensor.data = tensor.data.to(saved.dtype)
    checkpoint.load_model_tensors(model, chosen.model, chosen.state["aliases"])
    return model.to(device).eval()
