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
#: The attention that config.json of a model with gates asks for. No class but ours knows it: the family's own refuses.
ATTENTION_ON_DISK = "gape.hf, imported, with AutoModelForCausalLM"


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
    from gape.hf.modeling_gape import GapeConfig, GapeForCausalLM  # noqa: PLC0415

    AutoConfig.register(GapeConfig.model_type, GapeConfig, exist_ok=True)
    AutoModelForCausalLM.register(GapeConfig, GapeForCausalLM, exist_ok=True)


def _reduce_config(config: Any, protocol: Any) -> Any:
    """For pickle and copies: the class is made anew from the family's."""
    from gape.hf.saving import rebuilt  # noqa: PLC0415

    return rebuilt, (config_class, family_config(type(config))), vars(config)


class _OnDisk:
    """Mixed into a config class: what config.json holds beside the family's own values."""

    def to_diff_dict(self) -> dict[str, Any]:
        """As in `transformers`, which writes this to config.json."""
        values: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        return {**values, "attn_implementation": ATTENTION_ON_DISK}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in `transformers`."""
        values = {key: value for key, value in config_dict.items() if value != ATTENTION_ON_DISK}
        return super().from_dict(values, **kwargs)  # type: ignore[misc]


def family_config(made: type[Any]) -> type[Any]:
    """The family's own config class, of which :func:`config_class` made another."""
    return made.__mro__[2]


@functools.cache
def config_class(base: type[Any]) -> type[Any]:
    """The config class of models of `base` with gates; loading through AutoModelForCausalLM knows it from then on."""
    own = {"model_type": PREFIX + base.model_type, "__module__": __name__, "__reduce_ex__": _reduce_config}
    made = type(f"Gape{base.__name__}", (_OnDisk, base), own)
    model = model_class(MODEL_FOR_CAUSAL_LM_MAPPING[base])
    model.config_class = made
    AutoModelForCausalLM.register(made, model, exist_ok=True)
    return made


@functools.cache
def model_class(base: type[Any]) -> type[Any]:
    """The class of models of `base` with gates."""
    from gape.hf.saving import Saved  # noqa: PLC0415

    return type(f"Gape{base.__name__}", (Saved, base), {"gape_base": base, "__module__": __name__})
