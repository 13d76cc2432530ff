"""What the attention benchmark runs: the operator's implementations, and the kernels they stand beside.

    auto, reference, rank2, split, …        the operator, by `impl`
    split-kept       split within the head dim: six coordinates fewer for content, as a layer with reserve=6 has it
    sdpa-cudnn, sdpa-flash                  plain causal attention
    flex-causal      FlexAttention, plain causal attention
    flex-score-mod   FlexAttention, the gated bias as a score_mod with captured gates
    fla              forgetting attention of flash-linear-attention (pip install fla-core)
    fox              the official kernel of the Forgetting Transformer (its package is forgetting_transformer)

The last two have a bias of their own kind, one number per key and head, and no float64 to compare with here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gape
from gape.bench.inputs import CONTEXT_LENGTH, Arguments, problem
from gape.bench.settings import UnavailableError
from gape.ops import available_implementations, columns


@dataclass(frozen=True, kw_only=True)
class Work:
    """One candidate, ready to run.

    Attributes:
        leaves: its inputs by name.
        forward: the output from a dict like `leaves`.
        scale: its softmax scale, None for that of q's width.
        exact: whether the output is causal attention over leaves q, k, v, with the gates that are there.
    """

    leaves: Arguments
    forward: Callable[[Arguments], Tensor]
    scale: float | None = None
    exact: bool = True

    def step(self, *, backward: bool) -> Callable[[], object]:
        """What is timed: the forward pass without a graph, or forward and backward to every leaf."""
        if not backward:
            plain = {name: x.detach() for name, x in self.leaves.items()}
            return torch.no_grad()(lambda: self.forward(plain))
        leaves = {name: x.detach().requires_grad_() for name, x in self.leaves.items()}
        cotangent = torch.randn_like(self.forward(leaves))

        def both() -> object:
            return torch.autograd.grad(self.forward(leaves), list(leaves.values()), cotangent)

        return both


Builder = Callable[[Arguments, float], Work]


def gated(leaves: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator's tensors in its order."""
    return leaves["q"], leaves["k"], leaves["v"], leaves["gate"], leaves["landmark"], leaves["amplitude"]


def attended(leaves: Arguments, **options: Any) -> Tensor:
    """The operator's output over leaves; `options` are its keywords."""
    out = gape.gated_attention(*gated(leaves), context_length=CONTEXT_LENGTH, **options)
    assert isinstance(out, Tensor)
    return out


def operator(impl: str) -> Builder:
    """The gated operator through one implementation."""

    def build(arguments: Arguments, eps: float) -> Work:
        return Work(leaves=arguments, forward=lambda leaves: attended(leaves, impl=impl, eps=eps))

    return build


def _split_kept(arguments: Arguments, eps: float) -> Work:
    dim = arguments["q"].size(-1)
    if dim <= columns.COLUMNS:
        raise UnavailableError(f"head dim {dim} leaves nothing beside {columns.COLUMNS} coordinates")
    scale = dim**-0.5
    content = {name: arguments[name][..., : dim - columns.COLUMNS].contiguous() for name in "qk"}

    return Work(
        leaves=arguments | content, forward=lambda leaves: attended(leaves, scale=scale, impl="split"), scale=scale
    )


def _sdpa(backend: SDPBackend, *, needs_cuda: bool) -> Builder:
    def build(arguments: Arguments, eps: float) -> Work:
        if needs_cuda and not arguments["q"].is_cuda:
            raise UnavailableError("needs a CUDA device")
        grouped, scale = arguments["q"].size(1) != arguments["k"].size(1), arguments["q"].size(-1) ** -0.5

        def forward(leaves: Arguments) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    leaves["q"], leaves["k"], leaves["v"], is_causal=True, scale=scale, enable_gqa=grouped
                )

        return Work(leaves=_content(arguments), forward=forward)

    return build


def _flex_causal(arguments: Arguments, eps: float) -> Work:
    from gape.ops import flex  # noqa: PLC0415

    pairs = flex.block_mask(problem(arguments))
    scale = arguments["q"].size(-1) ** -0.5

    def forward(leaves: Arguments) -> Tensor:
        return flex.call(leaves["q"], leaves["k"], leaves["v"], pairs, scale)

    return Work(leaves=_content(arguments), forward=forward)


def _flex_score_mod(arguments: Arguments, eps: float) -> Work:
    from gape.ops import flex  # noqa: PLC0415

    pairs = flex.block_mask(problem(arguments))

    def forward(leaves: Arguments) -> Tensor:
        return flex.exact(problem(leaves), pairs)

    return Work(leaves=arguments, forward=forward)


def _fla(arguments: Arguments, eps: float) -> Work:
    _needs("fla", "pip install fla-core", arguments)
    from fla.ops.forgetting_attn import parallel_forgetting_attn  # noqa: PLC0415

    def forward(leaves: Arguments) -> Tensor:
        out: Tensor = parallel_forgetting_attn(leaves["q"], leaves["k"], leaves["v"], leaves["decay"])
        return out

    return Work(leaves=_token_first(arguments), forward=forward, exact=False)


def _fox(arguments: Arguments, eps: float) -> Work:
    _needs("forgetting_transformer", "pip install git+https://github.com/zhixuan-lin/forgetting-transformer", arguments)
    from forgetting_transformer import forgetting_attention  # noqa: PLC0415

    leaves = _token_first(arguments)
    groups = leaves["q"].size(2) // leaves["k"].size(2)
    leaves |= {name: leaves[name].repeat_interleave(groups, dim=2) for name in "kv"}

    def forward(leaves: Arguments) -> Tensor:
        out: Tensor = forgetting_attention(leaves["q"], leaves["k"], leaves["v"], leaves["decay"])
        return out

    return Work(leaves=leaves, forward=forward, exact=False)


def _content(arguments: Arguments) -> Arguments:
    return {name: arguments[name] for name in "qkv"}


def _token_first(arguments: Arguments) -> Arguments:
    """q, k, v as (B, N, H, D), and the logarithm of a forget gate per token and query head, float32 (B, N, Hq)."""
    leaves = {name: x.transpose(1, 2).contiguous() for name, x in _content(arguments).items()}
    g = torch.Generator(arguments["q"].device).manual_seed(1)
    logits = torch.randn(leaves["q"].shape[:3], generator=g, device=arguments["q"].device)
    return leaves | {"decay": F.logsigmoid(logits + 4)}


def _needs(package: str, install: str, arguments: Arguments) -> None:
    if find_spec(package) is None:
        raise UnavailableError(f"{package} is not installed: {install}")
    if not arguments["q"].is_cuda:
        raise UnavailableError("needs a CUDA device")


#: Every candidate by name; those with the gated bias come first.
CANDIDATES: dict[str, Builder] = {
    name: operator(name) for name in ("auto", *available_implementations()) if name != "decode"
} | {
    "split-kept": _split_kept,
    "flex-score-mod": _flex_score_mod,
    "flex-causal": _flex_causal,
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, needs_cuda=True),
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION, needs_cuda=False),
    "fla": _fla,
    "fox": _fox,
}
