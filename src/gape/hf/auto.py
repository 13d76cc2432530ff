"""Our classes in the Auto classes of `transformers`.

A model with gates is saved under a model type of its own, `gape_llama` for `llama`. `transformers` without `gape.hf`
does not know it and says so, instead of loading the model without its gates. The class of a family is made when it is
first needed: a subclass of the family's own.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from gape.hf import attend
from gape.hf.families import ATTENTION

PREFIX = "gape_"


class _Deferred(PretrainedConfig):  # type: ignore[misc]
    """Stands for the config class of a family with gates until one is read."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The family's own config, with what was said of the gates."""
        base = CONFIG_MAPPING[cls.model_type.removeprefix(PREFIX)]
        return config_class(base).from_dict(config_dict, **kwargs)


def register() -> None:
    """Make attention functions, model types and model classes known; doing it again changes nothing."""
    attend.register()
    for model_type in ATTENTION:
        name = PREFIX + model_type
        if name not in CONFIG_MAPPING:
            stands_for = type(f"Gape{model_type.title().replace('_', '')}Config", (_Deferred,), {"model_type": name})
            AutoConfig.register(name, stands_for)
    from gape.hf.gpt import GapeConfig, GapeForCausalLM  # noqa: PLC0415

    AutoConfig.register(GapeConfig.model_type, GapeConfig, exist_ok=True)
    AutoModelForCausalLM.register(GapeConfig, GapeForCausalLM, exist_ok=True)


def _reduce_config(config: Any, protocol: Any) -> Any:
    """For pickle and copies: the class is made anew from the family's."""
    from gape.hf.saving import rebuilt  # noqa: PLC0415

    return rebuilt, (config_class, type(config).__mro__[1]), vars(config)


@functools.cache
def config_class(base: type[Any]) -> type[Any]:
    """The config class of models of `base` with gates; loading through AutoModelForCausalLM knows it from then on."""
    own = {"model_type": PREFIX + base.model_type, "__module__": __name__, "__reduce_ex__": _reduce_config}
    made = type(f"Gape{base.__name__}", (base,), own)
    model = model_class(MODEL_FOR_CAUSAL_LM_MAPPING[base])
    model.config_class = made
    AutoModelForCausalLM.register(made, model, exist_ok=True)
    return made


@functools.cache
def model_class(base: type[Any]) -> type[Any]:
    """The class of models of `base` with gates."""
    from gape.hf.saving import Saved  # noqa: PLC0415

    return type(f"Gape{base.__name__}", (Saved, base), {"gape_base": base, "__module__": __name__})
