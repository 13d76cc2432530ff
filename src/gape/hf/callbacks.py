"""Gates in the log of the Trainer of `transformers`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from gape.hf.gates import RetrofitGates
from gape.utils.validation import invalid_argument

#: Keys with a landmark above this count as protected.
PROTECTED = 0.5


class GateCallback(TrainerCallback):  # type: ignore[misc]
    """Logs, whenever the Trainer does, how far each layer attends and how many keys it protects, in the last batch.

    `trainer.add_callback(gape.hf.GateCallback(trainer))` logs gates/layer_3/landmarks, the part of keys with a landmark
    above 0.5, and gates/layer_3/horizon: tokens after which a key loses one nat, at the layer's mean rate over queries,
    keys and heads, T / mean(Γ·g·(1 − l)). It is left out while nothing fades, as at an identity start.

    Raises:
        ValueError: the trainer's model has no gates of :func:`gape.hf.inject`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._values: dict[str, tuple[RetrofitGates, Tensor, Tensor]] = {}
        self._hooks: list[Any] = []
        if not _gates_of(trainer.model):
            expected = "one of a model with gates of gape.hf.inject"
            raise invalid_argument("trainer", type(trainer.model).__name__, expected)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to read what gates say."""
        for layer, gates in _gates_of(self.trainer.model):
            self._hooks.append(gates.register_forward_hook(partial(self._read, layer)))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model without a trace."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._values = [], {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log with every loss that is logged."""
        if control.should_log and self._values:
            self.trainer.log(self.statistics())
            # Whoever logs is taken to have logged the loss, and Trainer would leave it out.
            control.should_log = True

    def statistics(self) -> dict[str, float]:
        """What is logged, of the last batch."""
        numbers = {}
        for layer, (gates, gate, landmark) in self._values.items():
            exposure = (1 - landmark).mean((0, 2)).repeat_interleave(gate.size(1) // landmark.size(1))
            rate = float((gates.amplitude.detach() * gate.mean((0, 2)) * exposure).mean())
            rate /= gates.injection.context_length
            if rate > 0 and math.isfinite(rate):
                numbers[f"gates/layer_{layer}/horizon"] = 1 / rate
            numbers[f"gates/layer_{layer}/landmarks"] = float((landmark > PROTECTED).float().mean())
        return numbers

    def _read(self, layer: str, gates: Any, _: Any, output: tuple[Tensor, Tensor]) -> None:
        gate, landmark = output
        self._values[layer] = gates, gate.detach(), landmark.detach()


def _gates_of(model: nn.Module) -> list[tuple[str, RetrofitGates]]:
    """Gates and the numbers of their layers. An adapter has gates beside those of its base, of which one copy runs."""
    gates = [(name, module) for name, module in model.named_modules() if isinstance(module, RetrofitGates)]
    return [(next(part for part in name.split(".") if part.isdigit()), module) for name, module in gates]
