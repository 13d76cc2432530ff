"""Models with gates on disk: classes for the Auto classes of `transformers`, saving, loading.

A model with gates is saved under a model type of its own, `gape_llama` for `llama`. `transformers` without `gape.hf`
does not know it, so it cannot load the model without its gates. The gates are in the same safetensors file as the other
weights; config.json has their settings and their checksum. It also has an `auto_map` to a file that imports this module
and does nothing else: with `trust_remote_code=True` the Auto classes import it, without the flag nothing is run.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from gape.hf import adapters, implementations
from gape.hf.card import write_card
from gape.hf.families import ATTENTION, SEPARATE, TRANSFORMERS_4, Layout
from gape.hf.gates import MODULE, RetrofitGates, Settings, freeze, refuse_other_settings, warn_of_idle
from gape.utils import files
from gape.utils.validation import invalid_argument

PREFIX = "gape_"
#: What config.json of a model with gates asks for as attention, and after the name of its activation. No class but ours
#: knows either, so the family's own fails. A keyword may replace the attention, none the activation.
MARKER = "gape.hf, imported, with AutoModelForCausalLM"
#: What the families call the activation of their feed-forward layers.
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
#: The module beside config.json, and its names for the classes.
_LOADER = "load_gape"
_AUTO_MAP = {"AutoConfig": f"{_LOADER}.Config", "AutoModelForCausalLM": f"{_LOADER}.Model"}
_LOADER_TEXT = '''"""Lets transformers load this model with trust_remote_code=True: imports gape.hf, which wrote it."""

try:
    from gape.hf.save_load import auto_classes
except ImportError as error:
    raise ImportError("this model has gates of the package gape: pip install 'gape[hf]'") from error

Config, Model = auto_classes("{model_type}")
'''


def register() -> None:
    """Make our attention functions, model types and model classes known to `transformers`; may be called again."""
    from gape.hf.modeling_gape import GapeConfig, GapeForCausalLM  # noqa: PLC0415

    implementations.register()
    for model_type in ATTENTION:
        register_type(model_type)
    AutoConfig.register(GapeConfig.model_type, GapeConfig, exist_ok=True)
    AutoModelForCausalLM.register(GapeConfig, GapeForCausalLM, exist_ok=True)


def register_type(model_type: str) -> None:
    """Make the model type of a family with gates known to `transformers`; may be called again."""
    name = PREFIX + model_type
    if name not in CONFIG_MAPPING:
        class_name = f"Gape{model_type.title().replace('_', '')}Config"
        AutoConfig.register(name, type(class_name, (_DeferredConfig,), {"model_type": name}))


def register_family(model_type: str, attention: type[nn.Module], layout: Layout = SEPARATE) -> None:
    """Let :func:`gape.hf.inject` take models of an architecture of your own; call it before such models are loaded.

    The config and the model are known to the Auto classes already, by their `register`.

    Args:
        model_type: that of its config.
        attention: its attention class. A layer calls it with `position_ids`, and with `position_embeddings` (cosines,
            sines) where it rotates; it has `config` and `layer_idx`.
        layout: where such a module has its projections; those of Llama by default. Without `rotation`, that is
            `apply_rotary_pos_emb` in the module of the class.

    Raises:
        ValueError: a model type that the Auto classes do not know or that is known here, no class, or no rotation.
    """
    known = model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING
    if not known:
        expected = "one of AutoConfig.register and AutoModelForCausalLM.register; call them first"
        raise invalid_argument("model_type", model_type, expected)
    if not (isinstance(attention, type) and issubclass(attention, nn.Module)):
        raise invalid_argument("attention", attention, "a class of attention modules")
    if ATTENTION.get(model_type, (attention.__name__,))[0] != attention.__name__:
        raise invalid_argument("model_type", model_type, f"another one, since that is {ATTENTION[model_type][0]}'s")
    if layout.rotary and layout.rotation is None:
        rotation = getattr(sys.modules[attention.__module__], "apply_rotary_pos_emb", None)
        if rotation is None:
            raise invalid_argument("layout", layout, f"a rotation, since {attention.__module__} has none")
        layout = replace(layout, rotation=rotation)
    ATTENTION[model_type] = attention.__name__, layout
    register_type(model_type)


def auto_classes(model_type: str) -> tuple[type[Any], type[Any]]:
    """Config class and model class of a model type such as "gape_llama", for the file that `auto_map` names."""
    from gape.hf.modeling_gape import GapeConfig, GapeForCausalLM  # noqa: PLC0415

    if model_type == GapeConfig.model_type:
        return GapeConfig, GapeForCausalLM
    family = model_type.removeprefix(PREFIX)
    if family not in ATTENTION or family not in CONFIG_MAPPING:
        raise invalid_argument("model_type", model_type, f"one whose family is known; register {family!r} first")
    config = config_class(CONFIG_MAPPING[family])
    return config, model_class(MODEL_FOR_CAUSAL_LM_MAPPING[family_config(config)])


class LocalCode:
    """Mixed into classes that the file beside config.json names: their source is not copied to where they are saved."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: `transformers` would copy the module of the class into every directory."""


class AutoMapped(LocalCode):
    """Mixed into a config class: writes `auto_map` and the file that it names."""

    model_type: str

    def to_diff_dict(self) -> dict[str, Any]:
        """As in `transformers`, which writes this to config.json."""
        values: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        return {**values, "auto_map": _AUTO_MAP}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in `transformers`; the class is known now, so `auto_map` has done its part."""
        values = {name: value for name, value in config_dict.items() if name != "auto_map"}
        # `transformers serve` takes the class of this name from `transformers`, which has none of ours. Saving a model
        # writes its own.
        values["architectures"] = [AutoModelForCausalLM.__name__]
        return super().from_dict(values, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in `transformers`, and the file that `auto_map` names."""
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        text = _LOADER_TEXT.format(model_type=self.model_type)
        files.replace(Path(save_directory) / f"{_LOADER}.py", text.encode())


class _DeferredConfig(PretrainedConfig):  # type: ignore[misc]
    """Registered for a family with gates until a config of it is read, which makes the family's real class."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The family's own config, with the settings of the gates."""
        base = CONFIG_MAPPING[cls.model_type.removeprefix(PREFIX)]
        return config_class(base).from_dict(config_dict, **kwargs)


class _InjectedConfig(AutoMapped):
    """Mixed into a family's config class: what config.json holds beside the family's own values."""

    def to_diff_dict(self) -> dict[str, Any]:
        """As in `transformers`, which writes this to config.json."""
        values = super().to_diff_dict()
        activations = {name: getattr(self, name, None) for name in _ACTIVATIONS}
        marked = {name: f"{value}; {MARKER}" for name, value in activations.items() if isinstance(value, str)}
        return {**values, **marked, "attn_implementation": MARKER}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in `transformers`."""
        values = {key: value for key, value in config_dict.items() if value != MARKER}
        if TRANSFORMERS_4:
            values = {**_rotation_in_4(values, family_config(cls)), **values}
        for name in _ACTIVATIONS:
            if isinstance(values.get(name), str):
                values[name] = values[name].removesuffix(f"; {MARKER}")
        return super().from_dict(values, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and copies: the class is made again from the family's."""
        return rebuild, (config_class, family_config(type(self))), vars(self)


def _rotation_in_4(values: Mapping[str, Any], base: type[Any]) -> dict[str, Any]:
    """`rope_parameters`, where transformers 5 keeps rotations, under the names that transformers 4 reads."""
    parameters = values.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise invalid_argument("rope_parameters", parameters, "settings of a rotation")
    full = parameters.get("full_attention", parameters)
    scaled = full.get("rope_type", "default") != "default"
    named = {
        **dict.fromkeys(("rope_theta", "rotary_emb_base"), full.get("rope_theta")),
        **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), full.get("partial_rotary_factor")),
        "rope_local_base_freq": parameters.get("sliding_attention", {}).get("rope_theta"),
        "rope_scaling": {key: value for key, value in full.items() if key != "rope_theta"} if scaled else None,
    }
    known = inspect.signature(base.__init__).parameters
    return {name: value for name, value in named.items() if name in known and value is not None}


@functools.cache
def config_class(base: type[Any]) -> type[Any]:
    """The config class of models of `base` with gates; AutoModelForCausalLM knows it from then on."""
    own = {"model_type": PREFIX + base.model_type, "__module__": __name__}
    config = type(f"Gape{base.__name__}", (_InjectedConfig, base), own)
    model = model_class(MODEL_FOR_CAUSAL_LM_MAPPING[base])
    model.config_class = config
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    if not TRANSFORMERS_4:
        _convert_alike(base.model_type, PREFIX + base.model_type)
        _convert_alike(model.gape_base.__name__, model.__name__)
    return config


def _convert_alike(name: str, own: str) -> None:
    """Let transformers 5 rename and join saved tensors of our type or class as it does those of the family's."""
    from transformers import conversion_mapping  # noqa: PLC0415

    conversions = conversion_mapping.get_checkpoint_conversion_mapping(name)
    if conversions is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(own, conversions, overwrite=True)


def family_config(own: type[Any]) -> type[Any]:
    """The family's config class, of which :func:`config_class` made `own`."""
    base: type[Any] = own.__bases__[1]
    return base


@functools.cache
def model_class(base: type[Any]) -> type[Any]:
    """The class of models of `base` with gates."""
    # Not on top of the file: caches ask for classes of this one.
    from gape.hf.paged import with_pages  # noqa: PLC0415

    own = {"gape_base": base, "__module__": __name__, "forward": with_pages(base.forward)}
    return type(f"Gape{base.__name__}", (InjectedModel, base), own)


def rebuild(make_class: Callable[[type[Any]], type[Any]], base: type[Any]) -> Any:
    """An empty instance of the class that `make_class` makes of a class of `transformers`; pickle sets its state."""
    return object.__new__(make_class(base))


class GatedModel(LocalCode):
    """Mixed into causal language models with gates: what saving adds, what loading checks, what generation refuses."""

    config: Any

    def _store_checksum(self, checksum: str) -> None:
        """Write the checksum of the gates, and what else is checked, into the config."""
        raise NotImplementedError

    def _check_loaded(self, info: Mapping[str, Any], path: str) -> str | None:
        """Compare a loaded model with what its config says; the stored checksum, None where there is none."""
        raise NotImplementedError

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused with a ValueError before its thread begins, and so is `generate_batch`."""
        raise ValueError(f"continuous batching: {implementations.NO_BATCHING}")

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in `transformers`; also stores the gates' checksum and writes a model card."""
        model: Any = self
        state = kwargs.get("state_dict") or model.state_dict()
        self._store_checksum(gate_checksum(state))
        warn_of_idle(model, state)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            write_card(Path(save_directory), model)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in `transformers`; a ValueError where gates are missing or not those that were saved, or T is another."""
        with_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(  # type: ignore[misc]
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        path = str(pretrained_model_name_or_path)
        missing = sorted(name for name in info["missing_keys"] if is_gate(name))
        if missing:
            raise ValueError(f"{path}: {len(missing)} tensors of the gates are missing, {missing[0]} the first")
        checksum = model._check_loaded(info, path)
        if checksum not in (None, gate_checksum(model.state_dict())):
            raise ValueError(f"{path}: the gates are not those that were saved: their checksum differs")
        return (model, info) if with_info else model


class InjectedModel(GatedModel):
    """Mixed into a causal language model of `transformers`: builds gates from its config, saves and loads them."""

    gape_base: type[Any]
    gape_undo: dict[str, Any]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        from gape.hf.injection import install  # noqa: PLC0415

        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install(self, Settings.from_config(config))
        # What the model was before the injection is not in its files.
        self.gape_undo["loaded"] = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and copies: the class is made again from the family's, which can be imported by name."""
        return rebuild, (model_class, self.gape_base), vars(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Peft sets the configs of its adapters once their modules are in the model.
        if name == "peft_config":
            adapters.check(self, value)
            adapters.warn_of_frozen(self, value)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Peft adds the config of a second adapter to those it has set, and then loads its weights.
        adapters.check(self, getattr(self, "peft_config", {}))
        # Gates take the mean keys of a state that has some.
        if any(name.startswith(prefix) and name.endswith(".key_center") for name in state_dict):
            self.config.gape["centered"] = True
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """As in `transformers`; a ValueError for gates of an adapter that were trained under other settings.

        The adapter then stays in the model; load that anew.
        """
        info = super().load_adapter(*args, **kwargs)  # type: ignore[misc]
        self._check_settings("adapter")
        return info

    def _store_checksum(self, checksum: str) -> None:
        self.config.gape["checksum"] = checksum

    def _check_loaded(self, info: Mapping[str, Any], path: str) -> str | None:
        self._check_settings(path)
        freeze(self, Settings.from_config(self.config).learn)
        checksum: str | None = self.config.gape.get("checksum")
        return checksum

    def _check_settings(self, path: str) -> None:
        """Compare what was saved beside the gates, and beside those of adapters, with the model's settings."""
        model: Any = self
        for name, module in model.named_modules():
            if isinstance(module, RetrofitGates):
                refuse_other_settings(module.settings, module.injection, f"{path}: {name}")
                # Modules that stay in float32 have all their buffers cast to it.
                module.settings = module.settings.to(torch.int64)


def gate_checksum(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of the gates among a model's tensors: names, shapes and values in float32."""
    digest = hashlib.sha256()
    for name in sorted(filter(is_gate, state)):
        value = state[name].detach().cpu()
        value = (value.to(torch.float32) if value.is_floating_point() else value).contiguous()
        # torch.compile puts a prefix into names.
        digest.update(f"{name.replace('_orig_mod.', '')} {tuple(value.shape)}\n".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def is_gate(name: str) -> bool:
    """Whether a tensor of that name belongs to the gates of an injected model or to the scheme of our GPT."""
    return not {MODULE, "scheme"}.isdisjoint(name.split("."))
