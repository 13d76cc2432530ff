"""GAPE in models of `transformers`: inject, remove, train, save, load. `docs/guide/hf.md` is the guide.

Importing this package registers our classes with the Auto classes of `transformers`, so that
`AutoModelForCausalLM.from_pretrained` reads models that were saved with gates.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError("gape.hf needs transformers: pip install 'gape[hf]'") from error

from gape.hf.adapters import load_adapter, lora_config
from gape.hf.centering import center_keys
from gape.hf.families import Layout
from gape.hf.floors import FloorPlan, plan_floors
from gape.hf.formats import read_gguf, read_llama2c
from gape.hf.gates import parameter_groups, parameters
from gape.hf.gpt2 import extend_positions
from gape.hf.injection import inject, plan, remove
from gape.hf.language import LanguageModel
from gape.hf.modeling_gape import GapeConfig, GapeForCausalLM
from gape.hf.paged import ForgettingCache, FullCache
from gape.hf.plans import InjectionPlan, ModelPlan, explain
from gape.hf.save_load import gate_checksum, register, register_family

if TYPE_CHECKING:
    from gape.experiments.extend import extend
    from gape.hf.callbacks import GateCallback

#: Imported when they are first used: the Trainer of `transformers` is large, and `extend` is of a layer above.
_LAZY = {"GateCallback": "gape.hf.callbacks", "extend": "gape.experiments.extend"}

__all__ = [
    "FloorPlan",
    "ForgettingCache",
    "FullCache",
    "GapeConfig",
    "GapeForCausalLM",
    "GateCallback",
    "InjectionPlan",
    "LanguageModel",
    "Layout",
    "ModelPlan",
    "center_keys",
    "explain",
    "extend",
    "extend_positions",
    "gate_checksum",
    "inject",
    "load_adapter",
    "lora_config",
    "parameter_groups",
    "parameters",
    "plan",
    "plan_floors",
    "read_gguf",
    "read_llama2c",
    "register",
    "register_family",
    "remove",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gape.hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


register()
