"""Injected models on disk: gates in the same safetensors file, what they need in config.json, a checksum, a card."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gape.hf.adapters import MODULE, check_adapters
from gape.hf.card import write_card
from gape.hf.gates import RetrofitGates, refuse_other_length, refuse_other_settings, warn_of_idle
from gape.hf.settings import Settings


class Saved:
    """Mixed into a causal language model of `transformers`: builds gates from its config, saves and loads them."""

    gape_base: type[Any]
    gape_undo: dict[str, Any]
    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        from gape.hf.injection import install  # noqa: PLC0415

        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install(self, Settings.from_config(config))
        # What such a model does without is not known here.
        self.gape_undo["loaded"] = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and copies: the class is made anew from the family's, which has a name to be found by."""
        from gape.hf.auto import model_class  # noqa: PLC0415

        return rebuilt, (model_class, self.gape_base), vars(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Peft hands a model the configs of its adapters, once their modules are in it.
        if name == "peft_config":
            check_adapters(self, value)
        super().__setattr__(name, value)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """As in `transformers`; gates of an adapter that were trained under other settings are an error.

        Raises:
            ValueError: says which settings.
        """
        info = super().load_adapter(*args, **kwargs)  # type: ignore[misc]
        check_settings(self, "adapter")
        return info

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in `transformers`; also stores the gates' checksum and writes a model card."""
        model: Any = self
        state = kwargs.get("state_dict") or model.state_dict()
        self.config.gape["checksum"] = gate_checksum(state)
        warn_of_idle(model, state)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            write_card(Path(save_directory), model)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in `transformers`; gates that are missing or not those that were saved are an error.

        Raises:
            ValueError: says which gates.
        """
        from gape.hf.learn import freeze  # noqa: PLC0415

        told = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(  # type: ignore[misc]
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        where = str(pretrained_model_name_or_path)
        refuse_missing(info, where)
        check_gates(model, where)
        freeze(model, Settings.from_config(model.config).learn)
        return (model, info) if told else model


def rebuilt(made: Callable[[type[Any]], type[Any]], base: type[Any]) -> Any:
    """An empty instance of the class that `made` makes of a class of transformers; its state is set by pickle."""
    return object.__new__(made(base))


def refuse_missing(info: Mapping[str, Any], where: str) -> None:
    """Refuse a load that left gates as they were made.

    Raises:
        ValueError: names some of them.
    """
    missing = sorted(name for name in info["missing_keys"] if is_gate(name))
    if missing:
        raise ValueError(f"{where}: {len(missing)} tensors of the gates are missing, {missing[0]} the first")


def check_gates(model: Any, where: str) -> None:
    """Compare a model's gates with what its config says of them.

    Raises:
        ValueError: another T, or other values than were saved.
    """
    check_settings(model, where)
    stored = model.config.gape.get("checksum")
    if stored is not None and stored != gate_checksum(model.state_dict()):
        raise ValueError(f"{where}: the gates are not those that were saved: their checksum differs")


def check_settings(model: Any, where: str) -> None:
    """Compare what is kept beside a model's gates, and those of its adapters, with the model's settings.

    Raises:
        ValueError: another T, or other settings.
    """
    for name, module in model.named_modules():
        if isinstance(module, RetrofitGates):
            refuse_other_length(module.context_length, module.length, f"{where}: {name}")
            refuse_other_settings(module.settings, module.told, f"{where}: {name}")
            # What is kept in float32 becomes float32, these too.
            module.context_length = module.context_length.to(torch.int64)
            module.settings = module.settings.to(torch.int64)


def gate_checksum(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of the gates among a model's tensors: names, shapes and values in float32."""
    digest = hashlib.sha256()
    for name in sorted(filter(is_gate, state)):
        value = state[name].detach().cpu()
        value = (value.to(torch.float32) if value.is_floating_point() else value).contiguous()
        digest.update(f"{bare(name)} {tuple(value.shape)}\n".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def is_gate(name: str) -> bool:
    """Whether a tensor of that name belongs to the gates of an injected model or to the scheme of ours."""
    return not {MODULE, "scheme"}.isdisjoint(name.split("."))


def bare(name: str) -> str:
    """A tensor's name without what wrappers put in it."""
    return name.replace("_orig_mod.", "")
