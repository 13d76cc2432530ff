"""Adapters of peft on models with gates: an adapter says which gates its base needs, and other gates are an error.

It says so in `exclude_modules`, a field of peft's own: a pattern of modules that get no adapter, with a comment. A base
without gates has no such modules; peft then warns, also where this library is not imported, and prints the comment.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gape.hf.gates import RetrofitGates, refuse_other_length, refuse_other_settings
from gape.hf.settings import MARKED, Settings

#: The name under which an attention module keeps its gates; for PEFT's modules_to_save.
MODULE = "gape"
_COMMENT = "(?# gates of gape.hf.inject, which the base of this adapter needs: "
log = logging.getLogger("gape.hf")


def needed(settings: Settings) -> str:
    """The pattern of the modules that get no adapter; its comment holds the settings of the gates."""
    values = settings.to_dict()
    words = json.dumps({name: values[name] for name in ("context_length", *MARKED)})
    return rf"(.*\.)?{MODULE}(\..*)?{_COMMENT}{words})"


def check_adapters(model: Any, configs: Mapping[str, Any]) -> None:
    """Look at the adapters that peft puts on a model with gates, and let their configs say which gates those are.

    Raises:
        ValueError: an adapter that was trained with other gates.
    """
    gates = [module for module in model.modules() if isinstance(module, RetrofitGates)]
    if not gates:
        return
    own = Settings.from_config(model.config)
    for name, config in configs.items():
        came = getattr(config, "exclude_modules", None)
        if isinstance(came, str) and _COMMENT in came:
            _refuse_other(came.partition(_COMMENT)[2][:-1], own, f"adapter {name!r}")
        if not came and hasattr(config, "exclude_modules"):
            config.exclude_modules = needed(own)
    learns = not all(getattr(config, "inference_mode", False) for config in configs.values())
    silent = all(not p.requires_grad for module in gates for p in module.parameters())
    if learns and silent and not any(bool(module.strength.any()) for module in gates if not module.strength.is_meta):
        log.warning(
            "the gates are frozen and their strength is 0, so they never do anything: use gape.hf.lora_config(model), "
            'or modules_to_save=["%s"] in the config of the adapter',
            MODULE,
        )


def _refuse_other(words: str, own: Settings, where: str) -> None:
    theirs = Settings.from_config(SimpleNamespace(gape=json.loads(words)))
    refuse_other_length(torch.tensor(theirs.context_length), own.context_length, where)
    refuse_other_settings(torch.tensor(theirs.marks()), own, where)
