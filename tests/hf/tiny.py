"""Tiny random models of every family, made from configs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from gape.hf.families import TRANSFORMERS_4

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
#: Layers alternate between a window of eight tokens and everything.
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
                      "eos_token_id": None, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 8}),
    "mixtral": ("Mixtral", {**SIZES, **MOE, "sliding_window": None}),
    "qwen2": ("Qwen2", {**SIZES, **SLIDING, "use_sliding_window": True}),
    "qwen3": ("Qwen3", SIZES),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **MOE}),
    "gemma": ("Gemma", SIZES),
    "gemma2": ("Gemma2", {**SIZES, **SLIDING, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {**SIZES, **SLIDING, "query_pre_attn_scalar": 16}),
    "smollm3": ("SmolLM3", {**SIZES, "no_rope_layers": [1, 0], "use_sliding_window": False}),
    "phi3": ("Phi3", {**SIZES, "sliding_window": None, "attention_dropout": 0.0}),
    "olmo2": ("Olmo2", SIZES),
    "granite": ("Granite", {**SIZES, "attention_multiplier": 0.2, "embedding_multiplier": 2.0}),
    "starcoder2": ("Starcoder2", {**SIZES, "sliding_window": 8}),
    "cohere": ("Cohere", {**SIZES, "use_qk_norm": True, "logit_scale": 1.0}),
    "stablelm": ("StableLm", {**SIZES, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi": ("Phi", {**SIZES, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "gpt_neox": ("GPTNeoX", {**SIZES, "rotary_pct": 0.5}),
}  # fmt: skip
if TRANSFORMERS_4:
    # Refused there.
    del FAMILIES["stablelm"]

#: Families as they are without windows and caps, which caches in pages refuse, and without norms that have no bounds.
PLAIN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "gemma2": {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None},
    "gemma3": {"layer_types": ["full_attention"] * 2},
    "starcoder2": {"sliding_window": None},
    "stablelm": {"qk_layernorm": False},
    "phi": {"qk_layernorm": False},
}
#: Gates with a floor at which keys fade within a few tokens.
FLOOR = {"gate_floor": 96.0, "init_landmark_bias": -9.0}

#: Experts are summed in an order that depends on the other tokens, so these agree to rounding and not to the bit.
MIXTURES = ("mixtral", "qwen3_moe")
#: One of each kind of attention: one projection for all, separate ones, norms of q and k, caps and windows.
QUICK = ("gpt2", "llama", "qwen3", "gemma2")
RARE = [pytest.mark.slow, pytest.mark.families]
each_family = pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=RARE) for family in FAMILIES]
)
CLASSES = {"gpt2": "GPT2LMHeadModel"}
CONFIGS = {"gemma3": "Gemma3TextConfig"}


def tiny(family: str, implementation: str | None = None, seed: int = 0, **changes: Any) -> Any:
    """A model of a family with weights drawn large enough for its attention to matter."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, CONFIGS.get(family, f"{name}Config"))(**{**sizes, **changes})
    torch.manual_seed(seed)
    made = getattr(transformers, CLASSES.get(family, f"{name}ForCausalLM"))
    model = made._from_config(config, attn_implementation=implementation) if implementation else made(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.2, generator=generator)
    return model.eval()


def tokens(batch: int = 2, length: int = 20, seed: int = 0) -> torch.Tensor:
    """Random ids that are neither pads nor special."""
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def train(model: Any, steps: int = 5, rate: float = 1e-3) -> list[float]:
    """A few steps on one batch; the losses."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    ids = tokens(4, 24, seed=7)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def opened(model: Any, context_length: int = 16, seed: int = 3, **arguments: Any) -> Any:
    """The model with gates that matter: strong, and different for every head and token."""
    import gape.hf

    gape.hf.inject(model, context_length=context_length, **arguments)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gape." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + 0.5)
    return model


def injected(family: str, floor: dict[str, Any] = FLOOR, **changes: Any) -> Any:
    """A model of a family with gates as the paper starts them."""
    import gape.hf

    return gape.hf.inject(tiny(family, **changes), context_length=16, start="paper", gates=floor)


def ours(**changes: Any) -> Any:
    """Our GPT as a model of transformers."""
    import gape.hf
    from gape.models.config import GPTConfig
    from gape.models.gpt import GPT

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "context_length": 16}
    gpt = GPT(GPTConfig(**{**sizes, "options": FLOOR, **changes}))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return gape.hf.GapeForCausalLM.from_gpt(gpt.eval())


def made(name: str, **changes: Any) -> Any:
    """Our GPT ("gape"), or a model of a family with gates, without windows and caps."""
    if name == "gape":
        return ours(**changes)
    return injected(name, **{**PLAIN.get(name, {}), **changes})


def broken_off(model: Any, cache: Any, new: int = 3) -> None:
    """Read twelve tokens, and some more that the second layer never gets."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    layers = model.gpt.layers if hasattr(model, "gpt") else model.model.layers
    model(tokens(1, 12), past_key_values=cache)
    # Our GPT is called part by part.
    hook = next(layers[1].children()).register_forward_pre_hook(stop)
    try:
        model(tokens(1, new), past_key_values=cache)
    except KeyboardInterrupt:
        return
    finally:
        hook.remove()
    raise AssertionError("the call came to its end")


def same(family: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, to the bit where the family allows it."""
    return torch.allclose(a, b, atol=1e-5) if family in MIXTURES else torch.equal(a, b)


@torch.no_grad()
def last_logits_without(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last token where all keys are cached, and those that a cache lacks are hidden from it by head.

    Args:
        model: with gates in every layer; its layers take masks of mine from now on.
        cache: of transformers; each head may lack other keys.
        ids: (1, N).
    """
    from gape.hf.cache import unpack

    whole, masks = transformers.DynamicCache(), []
    for layer in cache.layers:
        positions = unpack(layer.keys, model.config.head_dim, by_head=True)[2]
        seen = torch.zeros(1, layer.keys.size(1), ids.size(1), dtype=torch.bool).scatter_(-1, positions, True)
        groups = model.config.num_attention_heads // layer.keys.size(1)
        masks.append(seen.repeat_interleave(groups, dim=1).unsqueeze(-2))
    model(ids[:, :-1], past_key_values=whole)
    for layer, mask in zip(model.model.layers, masks, strict=True):
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, mask=mask: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
        )
    return model(ids[:, -1:], past_key_values=whole).logits[:, -1]
