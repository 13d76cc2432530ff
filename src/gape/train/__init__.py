"""Training that loses nothing. `docs/guide/training.md` has the formats and the rules."""

from gape.data.windows import Batch, Source
from gape.train.checkpoint import CheckpointError, load_model, verify
from gape.train.config import TrainConfig
from gape.train.optimizer import learning_rate, parameter_groups
from gape.train.run_files import NonFiniteError
from gape.train.step import held_out_loss
from gape.train.trainer import Trainer
from gape.utils.files import BusyError, DiskFullError
from gape.utils.signals import Interrupted, StopFlag

__all__ = [
    "Batch",
    "BusyError",
    "CheckpointError",
    "DiskFullError",
    "Interrupted",
    "NonFiniteError",
    "Source",
    "StopFlag",
    "TrainConfig",
    "Trainer",
    "held_out_loss",
    "learning_rate",
    "load_model",
    "parameter_groups",
    "verify",
]
