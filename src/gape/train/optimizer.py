"""AdamW with three groups, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gape.distributed.job import Job
from gape.gates import GAPEGates, HeadProjection
from gape.train.config import TrainConfig

# Modules whose own parameters decide what is forgotten: weight decay would pull gates to half open, which is no prior.
GATES = (HeadProjection, GAPEGates)


def bare(name: str) -> str:
    """A parameter's name without the prefix of `torch.compile`."""
    return name.replace("_orig_mod.", "")


def parameter_groups(
    model: nn.Module, *, weight_decay: float = 0.1, gate_lr_multiplier: float = 1.0
) -> list[dict[str, Any]]:
    """The groups AdamW gets: `decayed`, `plain` and `gates`.

    - `decayed`: every tensor of two dimensions or more, embeddings too, as nanoGPT does.
    - `plain`: norms, biases and other vectors, undecayed.
    - `gates`: all parameters of gape's gates and FoX's forget gate, undecayed, at `gate_lr_multiplier` times the rate.

    Frozen parameters are left out, tied ones are in it once, empty groups are dropped.

    Returns:
        Dictionaries with `name`, `params`, `names` (without prefixes of wrappers), `weight_decay` and `lr_multiplier`.
    """
    gates = {id(p) for m in model.modules() if isinstance(m, GATES) for p in m.parameters(recurse=False)}
    groups: dict[str, dict[str, Any]] = {
        name: {"name": name, "params": [], "names": [], "weight_decay": decay, "lr_multiplier": multiplier}
        for name, decay, multiplier in (
            ("decayed", weight_decay, 1.0),
            ("plain", 0.0, 1.0),
            ("gates", 0.0, gate_lr_multiplier),
        )
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "gates" if id(parameter) in gates else "decayed" if parameter.dim() >= 2 else "plain"
            groups[kind]["params"].append(parameter)
            groups[kind]["names"].append(bare(name))
    return [group for group in groups.values() if group["params"]]


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of update `step` (from 1): a linear warm-up, then half a cosine, then the minimum."""
    done, end = step - 1, config.decay_steps or config.max_steps
    if done < config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    if done >= end:
        return config.min_learning_rate
    progress = (done - config.warmup_steps) / (end - config.warmup_steps)
    fall = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_learning_rate + fall * (config.learning_rate - config.min_learning_rate)


def build(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the groups of :func:`parameter_groups`; the fused one, which can skip an update without waiting."""
    groups = parameter_groups(model, weight_decay=config.weight_decay, gate_lr_multiplier=config.gate_lr_multiplier)
    if not groups:
        raise ValueError("model: got no parameter that requires a gradient, expected at least one")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_multiplier"]


def named(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The trained parameters by name, group after group."""
    return {n: p for group in optimizer.param_groups for n, p in zip(group["names"], group["params"], strict=True)}


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, flat: `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`."""
    return {
        f"{key}/{name}": value
        for name, parameter in named(optimizer).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], job: Job | None = None) -> None:
    """Load what :func:`state_tensors` gave, whole tensors that in a job only its first process has."""
    job, parameters = job or Job(), named(optimizer)
    dtypes: dict[str, str] = job.from_first(lambda: _checked(parameters, tensors))
    state: dict[Tensor, dict[str, Tensor]] = {}
    for full, dtype in dtypes.items():
        key, _, name = full.partition("/")
        parameter = parameters[name]
        # The count of steps is a number, and is in no shard.
        like = torch.zeros((), device=parameter.device) if key == "step" else torch.zeros_like(parameter.detach())
        target = like.to(getattr(torch, dtype))
        job.put(target, tensors.get(full))
        state.setdefault(parameter, {})[key] = target
    optimizer.state.clear()
    optimizer.state.update(state)


def _checked(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The dtype of each state by its name, if all fit the parameters."""
    for full, value in tensors.items():
        key, _, name = full.partition("/")
        if name not in parameters:
            raise ValueError(f"optimizer state {full!r}: got a parameter that is not trained here")
        expected = () if key == "step" else tuple(parameters[name].shape)
        if tuple(value.shape) != expected:
            raise ValueError(f"optimizer state {full!r}: got shape {tuple(value.shape)}, expected {expected}")
    return {name: str(value.dtype).removeprefix("torch.") for name, value in tensors.items()}
