"""Which models of `transformers` can have single tokens captured as a CUDA graph."""

from __future__ import annotations

from typing import Any

from torch import nn

from gape.hf.families import LLAMA_LIKE
from gape.models.cuda_graphs import model_cannot

#: Rotations that read positions to choose their frequencies have one of these words in their name.
_READING_ROTATIONS = ("dynamic", "longrope")


def model_obstacle(model: Any) -> str | None:
    """Why single tokens of a model cannot be captured; None where they can."""
    from gape.hf.modeling_gape import GapeForCausalLM  # noqa: PLC0415

    kind = str(model.config.model_type).removeprefix("gape_")
    modules = list(model.modules())
    if not isinstance(model, GapeForCausalLM):
        if kind not in LLAMA_LIKE:
            return f"models of type {kind} are not captured, only {', '.join(LLAMA_LIKE)}"
        rotations = [str(getattr(module, "rope_type", None)) for module in modules]
        reading = next((name for name in rotations if any(word in name for word in _READING_ROTATIONS)), None)
        if reading is not None:
            return f"rotations of type {reading} read positions"
    kinds = {type(weight) for weight in model.parameters()} - {nn.Parameter}
    if kinds:
        return f"it is not known whether a {kinds.pop().__qualname__} can be captured"
    places = {str(x.device) for x in (*model.parameters(), *model.buffers())}
    if len(places) > 1:
        return f"the model is on {' and '.join(sorted(places))}"
    homes = (
        "gape.", "torch.nn.", "transformers.activations", f"transformers.models.{kind}.", "peft.tuners.lora.",
        # Wraps gates that are saved with an adapter.
        "peft.utils.other",
    )  # fmt: skip
    return model_cannot(
        modules, model.get_input_embeddings().weight, lambda module: type(module).__module__.startswith(homes)
    )
