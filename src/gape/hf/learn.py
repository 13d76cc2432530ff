"""Which parameters learn: groups for optimisers, freezing, and a LoRA configuration that keeps the gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from gape.gates import GAPEGates
from gape.hf.adapters import MODULE, needed
from gape.hf.families import Family, family_of
from gape.hf.modeling_gape import GapeForCausalLM
from gape.hf.settings import LEARN, Settings
from gape.utils.validation import invalid_argument


def parameters(model: Any, which: str = "gates") -> list[nn.Parameter]:
    """Parameters of a model with gates, for an optimiser.

    Args:
        model: a model that gates were put into, or a :class:`gape.hf.GapeForCausalLM` with gates.
        which: "gates", "gates+qk" (the projections of q and k and their norms too; where q, k and v share one
            projection, that one), or "all".

    Raises:
        ValueError: another word, or a model without gates.
    """
    if which not in LEARN:
        raise invalid_argument("which", which, f"one of {', '.join(LEARN)}")
    if which == "all":
        return list(model.parameters())
    if not has_gates(model):
        raise invalid_argument("model", type(model).__name__, "one with gates, as gape.hf.inject makes it")
    chosen = [p for m in model.modules() if isinstance(m, GAPEGates) for p in m.parameters()]
    return chosen if which == "gates" else chosen + _qk_parameters(model)


def has_gates(model: nn.Module) -> bool:
    """Whether any layer of a model has gates."""
    return any(isinstance(module, GAPEGates) for module in model.modules())


def _qk_parameters(model: Any) -> list[nn.Parameter]:
    if isinstance(model, GapeForCausalLM):
        return [p for block in model.gpt.blocks() for p in block.attention.qkv.parameters()]
    family = family_of(model)
    return [p for module in family.modules(model) for _, p in qk_modules(module, family)]


def qk_modules(module: nn.Module, family: Family) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of what makes q and k in an attention module."""
    for name in family.layout.projections:
        part = getattr(module, name, None)
        if part is not None:
            yield from part.named_parameters(prefix=name)


def freeze(model: Any, learn: str) -> None:
    """Freeze what should not learn; "all" leaves everything as it is."""
    if learn == "all":
        return
    kept = {id(parameter) for parameter in parameters(model, learn)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in kept)


def lora_config(model: Any, **options: Any) -> Any:
    """A `peft.LoraConfig` for an injected model: adapters on its attention projections, gates saved with them.

    The adapter is loaded on a base into which gates of the same settings were put. A base with other gates is refused;
    peft warns of one without.

    Args:
        model: with gates.
        **options: of `LoraConfig`, such as r and lora_alpha; they win over what is chosen here.

    Raises:
        ImportError: peft is not installed.
    """
    try:
        from peft import LoraConfig  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install 'gape[hf]'") from error
    family = family_of(model)
    # GPT-2 has another c_proj in its feed-forward layers.
    known = {name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn")}
    known["c_proj"] = "attn.c_proj"
    first = family.modules(model)[0]
    chosen: dict[str, Any] = {
        "target_modules": [target for name, target in known.items() if hasattr(first, name)],
        "task_type": "CAUSAL_LM",
    }
    if has_gates(model):
        chosen |= {"modules_to_save": [MODULE], "exclude_modules": needed(Settings.from_config(model.config))}
    return LoraConfig(**(chosen | options))
