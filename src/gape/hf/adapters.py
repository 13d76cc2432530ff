"""Adapters of peft on models with gates.

An adapter says which gates its base needs in `exclude_modules`, a field of peft: a pattern of modules that get no
adapter, with a comment. A base without gates has no such modules; peft then warns and prints the comment, also where
this library is not imported.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from gape.hf.families import family_of
from gape.hf.gates import HASHED, MODULE, RetrofitGates, Settings, has_gates, refuse_other_settings
from gape.utils.validation import whole

#: Where the pattern in an adapter's config names the gates.
_COMMENT = "(?# gates of gape.hf.inject, which the base of this adapter needs: "
log = logging.getLogger("gape.hf")


def lora_config(model: Any, **options: Any) -> Any:
    """A `peft.LoraConfig` for an injected model: adapters on its attention projections, gates saved with them.

    :func:`load_adapter` loads it, and puts gates into the base first. A base with other gates is refused; peft itself
    warns of one without. Options of `LoraConfig`, such as r and lora_alpha, win over what is chosen here.

    Raises:
        ImportError: peft is not installed.
    """
    peft, family = _peft(), family_of(model)
    # GPT-2 has another c_proj in its feed-forward layers.
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query_key_value", "dense")
    targets = {name: name for name in names} | {"c_proj": "attn.c_proj"}
    first = family.modules(model)[0]
    defaults: dict[str, Any] = {
        "target_modules": [target for name, target in targets.items() if hasattr(first, name)],
        "task_type": "CAUSAL_LM",
    }
    if has_gates(model):
        pattern = _exclude_pattern(Settings.from_config(model.config))
        defaults |= {"modules_to_save": [MODULE], "exclude_modules": pattern}
    return peft.LoraConfig(**(defaults | options))


def load_adapter(base: Any, name: Any, **options: Any) -> Any:
    """A `peft.PeftModel`: a base with an adapter, after gates of the adapter's own settings were put into the base.

    Its merge_and_unload gives the model with gates, and the adapter merged into it.

    Args:
        base: the model that the adapter was trained on, with gates of the same settings or without gates. Gates are put
            into it in place.
        name: the adapter's directory, or its name on the hub.
        **options: of `peft.PeftModel.from_pretrained`, such as is_trainable.

    Raises:
        ImportError: peft is not installed.
        ValueError: the adapter names no gates or has none of its own, or the base has others.
    """
    peft = _peft()
    config = peft.PeftConfig.from_pretrained(name)
    settings = _settings_of(config)
    if not has_gates(base):
        if settings is None:
            raise ValueError(f"name: adapter {name} names no gates; peft.PeftModel.from_pretrained loads it")
        if MODULE not in (config.modules_to_save or ()):
            raise ValueError(
                f"name: adapter {name} holds no gates, expected those of gape.hf.lora_config; load its base with the "
                "gates that it was trained on"
            )
        # Not on top of the file: a module that it imports asks for this one.
        from gape.hf.injection import inject  # noqa: PLC0415

        # Quantised projections take gates only so; peft says itself what learns.
        inject(
            base, context_length=settings.context_length, position=settings.position, layers=settings.layers,
            learn="gates", gates=settings.gates, **settings.options,
        )  # fmt: skip
        if settings.centered:
            # Room for the mean keys of the adapter.
            base.config.gape["centered"] = True
            for module in base.modules():
                if isinstance(module, RetrofitGates):
                    module.move_keys()
    return peft.PeftModel.from_pretrained(base, name, **options)


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ImportError("adapters need peft: pip install 'gape[hf]'") from error


def add_lora(model: Any, rank: int, seed: int = 0) -> Any:
    """Put LoRA matrices beside the projections of a model, in place; these and its gates learn, all else is frozen.

    The model, with gates or without, keeps its class, so whatever trained it before trains it now. The matrices count
    twice their product. Returns the tuner of peft, whose `merge_and_unload()` adds them to the weights.

    Raises:
        ImportError: peft is not installed.
        ValueError: a rank below 1.
    """
    config = lora_config(model, r=whole("lora", rank), lora_alpha=2 * rank, modules_to_save=None)
    from peft.tuners.lora import LoraModel  # noqa: PLC0415

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        tuner = LoraModel(model, config, "default")
    for name, parameter in model.named_parameters():
        if f".{MODULE}." in name:
            parameter.requires_grad_(True)
    return tuner


def _exclude_pattern(settings: Settings, others: Any = None) -> str:
    """The pattern of the modules that get no adapter, which may be given as pattern or names of others that get none.

    Its comment, at the end, holds the settings of the gates.
    """
    values = settings.to_dict()
    words = json.dumps({name: values[name] for name in ("context_length", *HASHED, "centered")})
    pattern = rf"(.*\.)?{MODULE}(\..*)?{_COMMENT}{words})"
    if others and not isinstance(others, str):
        others = rf"(.*\.)?({'|'.join(re.escape(name) for name in sorted(others))})"
    return f"{others}|{pattern}" if others else pattern


def _settings_of(config: Any) -> Settings | None:
    """The settings of the gates that the config of an adapter names, if it names any."""
    pattern = getattr(config, "exclude_modules", None)
    if not isinstance(pattern, str) or _COMMENT not in pattern:
        return None
    words, _ = json.JSONDecoder().raw_decode(pattern.partition(_COMMENT)[2])
    return Settings.from_config(SimpleNamespace(gape=words))


def check(model: Any, configs: MutableMapping[str, Any]) -> None:
    """Refuse adapters of other gates than the model's; a config that names none is replaced by a copy with them."""
    if not configs or not has_gates(model):
        return
    own = Settings.from_config(model.config)
    for name, config in list(configs.items()):
        settings = _settings_of(config)
        if settings is not None:
            refuse_other_settings(settings.fingerprint(), own, f"adapter {name!r}")
            if settings.centered != own.centered and MODULE in (getattr(config, "modules_to_save", None) or ()):
                words = ("as they are", "about their mean")
                raise ValueError(
                    f"centered: gates of adapter {name!r} read keys {words[settings.centered]}, expected "
                    f"{words[own.centered]}, as those of the model; gape.hf.load_adapter gives a base without gates "
                    "those of the adapter"
                )
        elif hasattr(config, "exclude_modules"):
            configs[name] = copy.copy(config)
            configs[name].exclude_modules = _exclude_pattern(own, config.exclude_modules)


def warn_of_frozen(model: Any, configs: Mapping[str, Any]) -> None:
    """Warn where adapters learn beside gates that do nothing and cannot learn."""
    gates = [module for module in model.modules() if isinstance(module, RetrofitGates)]
    learns = not all(getattr(config, "inference_mode", False) for config in configs.values())
    frozen = bool(gates) and all(not p.requires_grad for module in gates for p in module.parameters())
    if learns and frozen and not any(bool(module.strength.any()) for module in gates if not module.strength.is_meta):
        log.warning(
            "the gates are frozen and their strength is 0, so they never do anything: use gape.hf.lora_config(model), "
            'or modules_to_save=["%s"] in the config of the adapter',
            MODULE,
        )
