"""Small models whose gates and biases are as large as trained ones, so that losing them would show."""

from __future__ import annotations

from typing import Any

import torch

import gape
from gape.positions import Scheme

T, VOCAB = 16, 27
SCHEMES = gape.positions.available()
GATED = [name for name in SCHEMES if gape.positions.is_gated(name)]


def config(position: str = "p-rope+gape", **changed: Any) -> gape.GPTConfig:
    sizes = {"vocab_size": VOCAB, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 48, "context_length": T}
    return gape.GPTConfig(position=position, **(sizes | changed))


def matrices(gpt: gape.GPT) -> dict[str, torch.nn.Parameter]:
    """The weights of linear layers, by the names of their layers."""
    return {name: module.weight for name, module in gpt.named_modules() if isinstance(module, torch.nn.Linear)}


def model(position: str = "p-rope+gape", dtype: torch.dtype = torch.float64, **changed: Any) -> gape.GPT:
    torch.manual_seed(0)
    made = gape.GPT(config(position, **changed)).to(dtype)
    with torch.no_grad():
        for parameter in matrices(made).values():
            parameter.normal_(std=0.2)
        for module in made.modules():
            if isinstance(module, Scheme):
                for parameter in module.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return made.eval()


def on_gpu(position: str = "p-rope+gape", dtype: torch.dtype = torch.float32, **changed: Any) -> gape.GPT:
    """Heads of 64 as kernels know them, and attention that rounding does not turn over."""
    made = model(position, torch.float32, **({"n_embd": 256, "context_length": 64} | changed))
    with torch.no_grad():
        for parameter in matrices(made).values():
            parameter.mul_(0.3)
    return made.cuda().to(dtype)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def interrupt(*_: object) -> None:
    """A hook that breaks a call off."""
    raise KeyboardInterrupt
