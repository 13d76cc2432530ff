"""Families of attention modules in `transformers`: their projections, sizes and scales.

A family that shares a layout needs one line in `ATTENTION`, and its tiny config in `tests/hf/tiny.py`.
:func:`gape.hf.register_family` adds an architecture that is not in `transformers`.

Shapes: B batch, N tokens, E width, Hq / Hk query / key heads, D head dim.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn

from gape.utils.validation import invalid_argument

#: In transformers 4, blocks of GPT-2 get no positions, and configs keep rotations under other names.
TRANSFORMERS_4 = int(transformers.__version__.split(".")[0]) < 5
#: Before transformers 5.4 caches are handed `cache_position`.
CACHE_POSITIONS = "cache_position" in inspect.signature(transformers.DynamicCache.get_mask_sizes).parameters
QKV = tuple[Tensor, Tensor, Tensor]
#: Called as rotation(q, k, cos, sin).
Rotation = Callable[..., tuple[Tensor, Tensor]]


def _sizes(module: Any) -> tuple[int, int, int]:
    config = module.config
    return config.num_attention_heads, config.num_key_value_heads, module.head_dim


def _separate(module: Any, x: Tensor) -> QKV:
    shape = (*x.shape[:-1], -1, module.head_dim)
    q, k, v = module.q_proj(x).view(shape), module.k_proj(x).view(shape), module.v_proj(x).view(shape)
    # hasattr is slow where a module lacks the attribute.
    if "q_norm" in module._modules:
        q, k = module.q_norm(q), module.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where an attention module has its projections, its sizes and its scale; by default where Llama's has them.

    Attributes:
        sizes: module → (Hq, Hk, D).
        project: (module, x (B, N, E)) → q, k, v (B, H, N, D), normed where the model norms them, not yet rotated.
        merge: (module, (B, N, Hq · D)) → (B, N, E).
        scale: module → the softmax scale.
        projections: names of the modules that make q and k.
        rotary: whether the model gives the module cosines and sines.
        interleaved: whether its rotation turns neighbours (x_2m, x_2m+1); no scheme of ours can take its place.
        rotation: (q, k, cos, sin) → rotated q and k; None takes `apply_rotary_pos_emb` of the model's own module.
    """

    sizes: Callable[[Any], tuple[int, int, int]] = _sizes
    project: Callable[[Any, Tensor], QKV] = _separate
    merge: Callable[[Any, Tensor], Tensor] = lambda module, x: module.o_proj(x)
    scale: Callable[[Any], float] = lambda module: float(module.scaling)
    projections: tuple[str, ...] = ("q_proj", "k_proj", "q_norm", "k_norm")
    rotary: bool = True
    interleaved: bool = False
    rotation: Rotation | None = None


def _separate_normed(module: Any, x: Tensor) -> QKV:
    parts = module.q_norm(module.q_proj(x)), module.k_norm(module.k_proj(x)), module.v_proj(x)
    return _heads(parts, x, module.head_dim)


def _separate_layernorm(module: Any, x: Tensor) -> QKV:
    q, k, v = _separate(module, x)
    return (module.q_layernorm(q), module.k_layernorm(k), v) if module.qk_layernorm else (q, k, v)


def _by_heads(module: Any, x: Tensor) -> QKV:
    parts = module.query_key_value(x).view(*x.shape[:-1], -1, 3 * module.head_size)
    q, k, v = parts.transpose(1, 2).chunk(3, dim=-1)
    return q, k, v


def _joined(module: Any, x: Tensor) -> QKV:
    n_heads, n_kv_heads, width = _sizes(module)
    return _heads(module.qkv_proj(x).split([n_heads * width, n_kv_heads * width, n_kv_heads * width], -1), x, width)


def _conv(module: Any, x: Tensor) -> QKV:
    return _heads(module.c_attn(x).split(module.split_size, dim=2), x, module.head_dim)


def _heads(parts: Iterable[Tensor], x: Tensor, width: int) -> QKV:
    """(B, H, N, D) of each of three parts (B, N, H · D)."""
    q, k, v = (part.view(*x.shape[:-1], -1, width).transpose(1, 2) for part in parts)
    return q, k, v


def _conv_scale(module: Any) -> float:
    scale = module.head_dim**-0.5 if module.scale_attn_weights else 1.0
    return float(scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale)


SEPARATE = Layout()
#: With norms over all heads at once.
NORMED = Layout(project=_separate_normed)
INTERLEAVED = Layout(interleaved=True)
#: With dropout of what attention adds to the residual stream.
DROPPED = Layout(
    merge=lambda module, x: F.dropout(module.o_proj(x), p=module.residual_dropout, training=module.training)
)
#: With norms of q and k that have another name.
LAYERNORMED = Layout(
    project=_separate_layernorm,
    scale=lambda module: float(module.head_dim**-0.5),
    projections=("q_proj", "k_proj", "q_layernorm", "k_layernorm"),
)
PHI = replace(LAYERNORMED, merge=lambda module, x: module.dense(x))
#: One projection in which each head has its q, k and v side by side.
BY_HEADS = Layout(
    sizes=lambda module: (module.config.num_attention_heads, module.config.num_attention_heads, module.head_size),
    project=_by_heads,
    merge=lambda module, x: module.dense(x),
    projections=("query_key_value",),
)
JOINED = Layout(project=_joined, projections=("qkv_proj",))
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
    "olmo2": ("Olmo2Attention", NORMED),
    "granite": ("GraniteAttention", SEPARATE),
    "starcoder2": ("Starcoder2Attention", DROPPED),
    "cohere": ("CohereAttention", INTERLEAVED),
    "stablelm": ("StableLmAttention", LAYERNORMED),
    "phi": ("PhiAttention", PHI),
    "gpt_neox": ("GPTNeoXAttention", BY_HEADS),
}
#: Families that rotate pairs (x_m, x_{m+D/2}) by cosines and sines whose halves are alike, and launch the same kernels
#: for every token, which mixtures of experts do not.
LLAMA_LIKE = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
#: Model type → why gates cannot be put into it.
REFUSED = {
    "gpt_oss": "its softmax has an attention sink, one more logit a head, which the operator does not have",
    "gemma3": "tokens of an image attend to each other in both directions, and distances have a sign; "
    "the language model alone takes gates, a Gemma3ForCausalLM with model.model.language_model as its model",
}
if TRANSFORMERS_4:
    REFUSED["stablelm"] = "in transformers 4 its packed documents see each other; transformers 5 runs it"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model's family: its model type, the name of its attention class, and that class's layout.

    Layouts and rotations are functions, some without a name: copies and pickles look the family up again.
    """

    model_type: str
    attention: str
    layout: Layout

    def modules(self, model: nn.Module) -> list[Any]:
        """The self-attention modules of a model, first layer first."""
        modules = [m for m in model.modules() if any(self.attention == kind.__name__ for kind in type(m).__mro__)]
        return [module for module in modules if not getattr(module, "is_cross_attention", False)]

    def __reduce__(self) -> Any:
        return family_named, (self.model_type,)

    @functools.cached_property
    def rotation(self) -> Rotation | None:
        """The family's own rotation, of q, k, cosines and sines, or None."""
        if not self.layout.rotary or self.layout.rotation is not None:
            return self.layout.rotation
        home = self.model_type.removesuffix("_text")
        module = import_module(f"transformers.models.{home}.modeling_{home}")
        return functools.partial(_rotate_first, module.apply_rotary_pos_emb)


def _rotate_first(rotation: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate as many coordinates of each head as there are cosines, the first ones."""
    width = cos.size(-1)
    if width == q.size(-1):
        return rotation(q, k, cos, sin)
    rotated = rotation(q[..., :width], k[..., :width], cos, sin)
    turned_q, turned_k = (torch.cat([part, x[..., width:]], dim=-1) for part, x in zip(rotated, (q, k), strict=True))
    return turned_q, turned_k


def family_of(model: Any) -> Family:
    """The family of a causal language model; a ValueError says which there are in :data:`ATTENTION`."""
    known = ", ".join(ATTENTION)
    if not isinstance(model, transformers.PreTrainedModel):
        raise invalid_argument("model", model, f"a causal language model of transformers: {known}")
    model_type = str(model.config.model_type).removeprefix("gape_")
    name = type(model).__name__
    if model_type in REFUSED:
        raise ValueError(f"model: got {name} of type {model_type!r}: {REFUSED[model_type]}")
    if model_type not in ATTENTION or not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(
            f"model: got {name} of type {model_type!r}, expected a causal language model of {known}; "
            "gape.hf.register_family adds another"
        )
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

    Refused are models without one, with several, and those that rescale them.
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
    names = ("partial_rotary_factor", "rotary_pct")
    values = (parameters.get(name) or getattr(config, name, None) for name in names)
    return float(next(filter(None, values), 1.0))


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
