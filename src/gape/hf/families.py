"""Families of attention modules in `transformers`: their projections, sizes and scales.

A family that shares a layout needs one line in `ATTENTION`, and its tiny config in `tests/hf/tiny.py`.

Shapes: B batch, N tokens, E width, Hq / Hk query / key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import transformers
from torch import Tensor, nn

from gape.utils.validation import invalid_argument

#: In transformers 4, blocks of GPT-2 get no positions, caches get `cache_position`, and `sdpa` does not cap logits.
TRANSFORMERS_4 = int(transformers.__version__.split(".")[0]) < 5
QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where an attention module has its projections, its sizes and its scale.

    Attributes:
        sizes: module → (Hq, Hk, D).
        project: (module, x (B, N, E)) → q, k, v (B, H, N, D), normed where the model norms them, not yet rotated.
        merge: (module, (B, N, Hq · D)) → (B, N, E).
        scale: module → the softmax scale.
        projections: names of the modules that make q and k.
        rotary: whether the model gives the module cosines and sines.
    """

    sizes: Callable[[Any], tuple[int, int, int]]
    project: Callable[[Any, Tensor], QKV]
    merge: Callable[[Any, Tensor], Tensor]
    scale: Callable[[Any], float]
    projections: tuple[str, ...]
    rotary: bool


def _sizes(module: Any) -> tuple[int, int, int]:
    config = module.config
    return config.num_attention_heads, config.num_key_value_heads, module.head_dim


def _separate(module: Any, x: Tensor) -> QKV:
    shape = (*x.shape[:-1], -1, module.head_dim)
    q, k, v = (projection(x).view(shape) for projection in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _joined(module: Any, x: Tensor) -> QKV:
    n_heads, n_kv_heads, width = _sizes(module)
    parts = module.qkv_proj(x).split([n_heads * width, n_kv_heads * width, n_kv_heads * width], dim=-1)
    q, k, v = (part.view(*x.shape[:-1], -1, width).transpose(1, 2) for part in parts)
    return q, k, v


def _conv(module: Any, x: Tensor) -> QKV:
    parts = module.c_attn(x).split(module.split_size, dim=2)
    q, k, v = (part.view(*x.shape[:-1], -1, module.head_dim).transpose(1, 2) for part in parts)
    return q, k, v


def _conv_scale(module: Any) -> float:
    scale = module.head_dim**-0.5 if module.scale_attn_weights else 1.0
    return float(scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale)


SEPARATE = Layout(
    sizes=_sizes,
    project=_separate,
    merge=lambda module, x: module.o_proj(x),
    scale=lambda module: float(module.scaling),
    projections=("q_proj", "k_proj", "q_norm", "k_norm"),
    rotary=True,
)
JOINED = Layout(
    sizes=_sizes,
    project=_joined,
    merge=lambda module, x: module.o_proj(x),
    scale=lambda module: float(module.scaling),
    projections=("qkv_proj",),
    rotary=True,
)
CONV = Layout(
    sizes=lambda module: (module.num_heads, module.num_heads, module.head_dim),
    project=_conv,
    merge=lambda module, x: module.resid_dropout(module.c_proj(x)),
    scale=_conv_scale,
    projections=("c_attn",),
    rotary=False,
)

#: Model type → (attention class, layout).
ATTENTION: dict[str, tuple[str, Layout]] = {
    "gpt2": ("GPT2Attention", CONV),
    "llama": ("LlamaAttention", SEPARATE),
    "mistral": ("MistralAttention", SEPARATE),
    "mixtral": ("MixtralAttention", SEPARATE),
    "qwen2": ("Qwen2Attention", SEPARATE),
    "qwen3": ("Qwen3Attention", SEPARATE),
    "qwen3_moe": ("Qwen3MoeAttention", SEPARATE),
    "gemma": ("GemmaAttention", SEPARATE),
    "gemma2": ("Gemma2Attention", SEPARATE),
    "gemma3_text": ("Gemma3Attention", SEPARATE),
    "smollm3": ("SmolLM3Attention", SEPARATE),
    "phi3": ("Phi3Attention", JOINED),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model's family: its model type, the name of its attention class, and that class's layout."""

    model_type: str
    attention: str
    layout: Layout

    def modules(self, model: nn.Module) -> list[Any]:
        """The self-attention modules of a model, first layer first."""
        modules = [module for module in model.modules() if self.attention in _ancestry(module)]
        return [module for module in modules if not getattr(module, "is_cross_attention", False)]

    def rotation(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """The family's own `apply_rotary_pos_emb(q, k, cos, sin)`, or None."""
        if not self.layout.rotary:
            return None
        home = self.model_type.removesuffix("_text")
        module = import_module(f"transformers.models.{home}.modeling_{home}")
        rotate: Callable[..., tuple[Tensor, Tensor]] = module.apply_rotary_pos_emb
        return rotate


def family_of(model: Any) -> Family:
    """The family of a causal language model.

    Raises:
        ValueError: it is of no family in :data:`ATTENTION`; says which there are.
    """
    known = ", ".join(ATTENTION)
    if not isinstance(model, transformers.PreTrainedModel):
        raise invalid_argument("model", model, f"a causal language model of transformers: {known}")
    model_type = str(model.config.model_type).removeprefix("gape_")
    name = type(model).__name__
    if model_type not in ATTENTION or not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(f"model: got {name} of type {model_type!r}, expected a causal language model of {known}")
    family = family_named(model_type)
    if not family.modules(model):
        raise ValueError(f"model: {name} has no {family.attention}, expected one in each layer")
    return family


def family_named(model_type: str) -> Family:
    """The family of a model type in :data:`ATTENTION`."""
    attention, layout = ATTENTION[model_type]
    return Family(model_type=model_type, attention=attention, layout=layout)


def rope_theta(config: Any) -> float:
    """The base of a model's rotary frequencies, in any version of `transformers`.

    Raises:
        ValueError: it has none, or several, or rescales them.
    """
    parameters = getattr(config, "rope_parameters", None) or {"rope_theta": getattr(config, "rope_theta", None)}
    scaling = getattr(config, "rope_scaling", None) or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else "default"
    theta = parameters.get("rope_theta")
    several = getattr(config, "rope_local_base_freq", None) is not None
    if theta is None or several or kind not in (None, "default"):
        raise ValueError(
            f"position: the model's own rotation is {kind or 'unknown'!r} with base {theta}, expected a plain one to "
            "put another in its place; position=None keeps it and adds the gates"
        )
    return float(theta)


def rotated_part(config: Any) -> float:
    """The part of each head that a model rotates, in any version of `transformers`; 1 for most."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0)


def window_of(module: Any) -> int | None:
    """How many of the latest tokens an attention module sees, wherever its family says so; None: all."""
    config = module.config
    kinds = getattr(config, "layer_types", None)
    if hasattr(module, "sliding_window"):
        window = module.sliding_window
    elif kinds is not None and kinds[module.layer_idx] == "full_attention":
        window = None
    else:
        window = getattr(config, "sliding_window", None)
    return int(window) if window else None


def _ancestry(module: nn.Module) -> Iterator[str]:
    return (parent.__name__ for parent in type(module).__mro__)
