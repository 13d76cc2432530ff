"""Put GAPE into a loaded model, take it out again, and say beforehand what that would change."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gape import positions as schemes
from gape.hf import gpt2
from gape.hf.attention import InjectedAttention, Wiring, injected_class
from gape.hf.card import origin
from gape.hf.families import TRANSFORMERS_4, Family, family_of, rope_theta, rotated_part
from gape.hf.gates import MODULE, REMEDY, RetrofitGates, Settings, freeze, qk_modules
from gape.hf.implementations import supported_name
from gape.hf.plans import InjectionPlan, injection_plan
from gape.hf.save_load import InjectedModel, config_class, family_config, model_class
from gape.models.config import of_layer
from gape.utils.validation import invalid_argument, whole

if TYPE_CHECKING:
    from gape.hf.floors import FloorPlan

log = logging.getLogger("gape.hf")


def inject(
    model: Any,
    *,
    context_length: int | None = None,
    position: str | None = None,
    layers: Iterable[int] | None = None,
    learn: str = "all",
    start: str = "identity",
    gates: Mapping[str, Any] | None = None,
    floors: FloorPlan | None = None,
    dry_run: bool = False,
    **options: Any,
) -> Any:
    """Put gates into a causal language model of `transformers`, in place. Everything is checked first.

    Args:
        model: of a family in `gape.hf.families`.
        context_length: T, the length the model is (or will be) trained at; must be given. For "yarn" it is the context
            that the model had before, `max_position_embeddings`: its frequencies are stretched by that.
        position: "p-rope+gape", "nope+gape", … puts another scheme in the place of the model's own positions; without
            `+gape` no gates come with it. None keeps the model's positions and adds gates.
        layers: numbers of the layers to put gates into, negative ones from the end; None means all. Another `position`
            takes all.
        learn: "gates" freezes everything else, "gates+qk" all but gates and projections of q and k; "all" freezes
            nothing that was not frozen.
        start: "identity" begins with exactly the model's own logits (of its own positions), "paper" with Γ = 1. Heads
            that rotate in another way than the model's change its logits, whatever the start.
        gates: options of :class:`gape.GAPEGates`, such as {"gate_floor": 1.0}; floors may be a list for each layer of
            the model, as :func:`gape.models.config.of_layer` says.
        floors: a plan of :func:`gape.hf.plan_floors`, which gives context_length, position, gate_floor and
            head_positions. Beside it, log_scale=True is for heads without a floor alone.
        dry_run: print what would be done, and do nothing.
        **options: options of the scheme, such as fraction or theta; theta is the model's own by default. Lists of
            `head_positions` and `log_scale` may be given for each layer, as floors.

    Returns:
        The model.

    Raises:
        ValueError: another family, gates there already, quantised q and k that should learn, no context length, one
            beyond the positions that the model has learned, or a value out of range. The model is then as it was.
    """
    settings, family = _checked(
        model, context_length=context_length, position=position, layers=layers, learn=learn, start=start, gates=gates,
        floors=floors, **options,
    )  # fmt: skip
    _warn_of_native(model, family, settings)
    if dry_run:
        print(injection_plan(model, family, settings))
        return model
    learned = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    _own_config(model)
    model.config.gape = settings.to_dict() | origin(model.config)
    if settings.native is not None:
        factor = _factor(_scheme(family, settings, model, 0), settings)
        model.config.max_position_embeddings = int(settings.native * factor)
    model.__class__, model.config.__class__ = model_class(model.__class__), config_class(model.config.__class__)
    install(model, settings)
    if start == "identity" and any(max(m.gate_floor) > 0 for m in model.modules() if isinstance(m, RetrofitGates)):
        log.warning("gate_floor: Γ is 0 at an identity start, where nothing fades until gates learn; %s", REMEDY)
    freeze(model, learn)
    model.gape_undo["requires_grad"] = learned
    return model


def plan(model: Any, **arguments: Any) -> InjectionPlan:
    """What :func:`inject` would do with these arguments, as an object to print or to read.

    Raises:
        ValueError: as :func:`inject`.
    """
    settings, family = _checked(model, **arguments)
    return injection_plan(model, family, settings)


def install(model: Any, settings: Settings) -> None:
    """Change the classes of a model's attention modules and add gates; `gape_undo` of the model says how to undo it."""
    family = family_of(model)
    undo: dict[str, Any] = {"implementation": model.config._attn_implementation, "hooks": []}
    if family.model_type == "gpt2":
        undo |= gpt2.limit_positions(model, replaced=settings.position is not None)
    modules = family.modules(model)
    numbers = settings.layers if settings.layers is not None else range(len(modules))
    for number in numbers:
        scheme = _scheme(family, settings, model, number)
        wiring = Wiring(
            family=family, context_length=settings.context_length, first_layer=numbers[0], scheme=scheme,
            softcap=settings.softcap,
        )  # fmt: skip
        module = modules[number]
        gates = _gates(module, family, settings, of_layer(settings.gates, number, len(modules)))
        if gates is not None:
            gates.to(next(module.parameters()).device).train(module.training)
        module.__class__ = injected_class(module.__class__)
        module.gape_wiring = wiring
        setattr(module, MODULE, gates)
    _warn_of_dropout(modules[numbers[0]])
    model.config._attn_implementation = supported_name(model.config._attn_implementation)
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), MODULE}
    object.__setattr__(model, "gape_undo", undo)


def remove(model: Any) -> Any:
    """Take the gates out of a model, in place: its class, its config and its tensors are those before the injection.

    Weights that were trained in between stay as they are.

    Raises:
        ValueError: it has none; or it was saved without the positions it had learned, which cannot come back.
    """
    gated: object = model
    if not isinstance(gated, InjectedModel):
        raise invalid_argument("model", type(model).__name__, "a model that gape.hf.inject has put gates into")
    undo: dict[str, Any] = model.gape_undo
    if family_of(model).model_type == "gpt2":
        gpt2.restore_positions(model, undo)
    for module in family_of(model).modules(model):
        if isinstance(module, InjectedAttention):
            delattr(module, MODULE)
            del module.gape_wiring
            vars(module).pop("skips", None)
            module.__class__ = module.gape_base  # type: ignore[assignment]
    for handle in undo["hooks"]:
        handle.remove()
    base, native = model.gape_base, Settings.from_config(model.config).native
    model.config._attn_implementation = undo["implementation"]
    del model.config.gape
    if native is not None:
        model.config.max_position_embeddings = native
    model.config.__class__ = family_config(type(model.config))
    model._keep_in_fp32_modules_strict = type(model._keep_in_fp32_modules_strict)(
        name for name in model._keep_in_fp32_modules_strict if name != MODULE
    )
    object.__delattr__(model, "gape_undo")
    model.__class__ = base
    for name, parameter in model.named_parameters():
        # Quantised ones are integers, which cannot learn.
        parameter.requires_grad_(undo.get("requires_grad", {}).get(name, parameter.is_floating_point()))
    return model


def _checked(
    model: Any,
    *,
    context_length: int | None = None,
    position: str | None = None,
    layers: Iterable[int] | None = None,
    learn: str = "all",
    start: str = "identity",
    gates: Mapping[str, Any] | None = None,
    floors: FloorPlan | None = None,
    **options: Any,
) -> tuple[Settings, Family]:
    """The settings and the family, after every check that needs no change of the model."""
    if floors is not None:
        context_length, position, gates, options = _planned(floors, context_length, position, gates, options)
    if isinstance(model, nn.Module) and any(isinstance(m, InjectedAttention) for m in model.modules()):
        raise ValueError(
            "model: got one with gates, expected one without; gape.hf.explain says what runs in it, "
            "gape.hf.remove takes them out"
        )
    family = family_of(model)
    count = len(family.modules(model))
    if layers is not None and position is not None:
        raise invalid_argument("layers", layers, "None, since another position takes every layer")
    numbers = None if layers is None else _layers(layers, count)
    settings = Settings(
        context_length=context_length,  # type: ignore[arg-type]
        position=position, layers=numbers, start=start, gates=_plain(gates or {}), options=_plain(options),
        learn=learn,
    )  # fmt: skip
    if settings.gates and not settings.gated:
        raise invalid_argument("gates", dict(settings.gates), f"none, since {position} has no gates")
    caps = getattr(model.config, "attn_logit_softcapping", None) is not None
    if supported_name(model.config._attn_implementation) == "sdpa" and (
        TRANSFORMERS_4 or (caps and model._supports_sdpa)
    ):
        # There, sdpa does not cap logits, and the model stays as it was. Later versions say that it does not run them.
        settings = replace(settings, softcap=False)
    _refuse_model(model, family, settings, learn)
    if _factor(_scheme(family, settings, model, 0), settings) > 1:
        settings = replace(settings, native=model.config.max_position_embeddings)
    # Only to check the options: without memory, and without drawing numbers.
    with torch.device("meta"):
        for number, module in enumerate(family.modules(model)):
            _gates(module, family, settings, of_layer(settings.gates, number, count))
            scheme = _scheme(family, settings, model, number)
            if not getattr(module, "use_rope", True) and any(getattr(scheme, "log_scale", ())):
                raise ValueError(f"log_scale: layer {number} has no rotation to carry it, expected False")
    return settings, family


def _refuse_model(model: Any, family: Family, settings: Settings, learn: str) -> None:
    """Refuse models whose attention is not that of the family's layout, or that cannot learn what should learn."""
    config = model.config
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise ValueError("model: got one that attends in both directions, expected a causal one")
    if getattr(config, "add_cross_attention", False):
        raise ValueError("model: got one with cross-attention, expected self-attention alone")
    for number, module in enumerate(family.modules(model)):
        if hasattr(module, "_hf_hook"):
            raise ValueError("model: its layers are spread by accelerate; inject first, then dispatch")
        if "forward" in vars(module):
            raise ValueError(
                f"model: got a forward of its own in the attention of layer {number}, expected that of its class; "
                "a patch puts one there, and transformers 4 leaves one behind after output_attentions: load it anew"
            )
        quantised = [n for n, p in qk_modules(module, family) if not p.is_floating_point() or hasattr(p, "quant_state")]
        if learn != "gates" and quantised:
            expected = f"'gates', since {quantised[0]} of q and k is quantised and cannot learn"
            raise invalid_argument("learn", learn, expected)
    limit = gpt2.limit(model) if family.model_type == "gpt2" and settings.position is None else None
    if limit is not None and settings.context_length > limit:
        raise invalid_argument("context_length", settings.context_length, gpt2.longer_positions(limit))


def _layers(layers: Iterable[int], count: int) -> tuple[int, ...]:
    """Numbers from 0, rising, each once."""
    numbers = []
    for number in layers:
        whole("layers", number + count if isinstance(number, int) and not isinstance(number, bool) else number, 0)
        if number >= count:
            raise invalid_argument("layers", number, f"numbers from {-count} to {count - 1}")
        numbers.append(int(number) % count)
    if not numbers:
        raise invalid_argument("layers", layers, "at least one layer")
    return tuple(sorted(set(numbers)))


def _planned(
    floors: FloorPlan,
    context_length: int | None,
    position: str | None,
    gates: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> tuple[int, str | None, dict[str, Any], dict[str, Any]]:
    """T, position, options of the gates and of the scheme, with those of a plan of floors."""
    given = {"context_length": context_length, "position": position, **(gates or {}), **options}
    for name in ("context_length", "position", "gate_floor", "head_positions"):
        if given.get(name) is not None:
            raise invalid_argument(name, given[name], "none beside a plan of floors, which gives it")
    own_gates, own_options = {**(gates or {}), "gate_floor": floors.gate_floor}, dict(options)
    if floors.head_positions is not None:
        own_options["head_positions"] = floors.head_positions
    if own_options.get("log_scale") is True:
        # Scores that grow would lift keys beyond T over the bound that a floor is for.
        own_options["log_scale"] = floors.unbounded()
    return floors.context_length, floors.position, own_gates, own_options


def _scheme(family: Family, settings: Settings, model: Any, layer: int) -> schemes.Scheme | None:
    """The scheme that takes the place of the model's own rotation in a layer, or None."""
    if settings.base is None:
        if settings.options:
            raise ValueError(f"{next(iter(settings.options))}: an option of a scheme, expected position= beside it")
        return None
    modules = family.modules(model)
    n_heads, n_kv_heads, width = family.layout.sizes(modules[layer])
    options = of_layer(settings.options, layer, len(modules))
    if family.layout.rotary and settings.base != "nope":
        if family.layout.interleaved:
            raise ValueError("position: the model rotates neighbouring coordinates, expected None, which keeps that")
        if rotated_part(model.config) != 1.0:
            raise ValueError("position: the model rotates a part of each head, expected None, which keeps that")
        options.setdefault("theta", rope_theta(model.config))
    return schemes.build(
        settings.base, n_heads=n_heads, head_dim=width, n_kv_heads=n_kv_heads,
        context_length=settings.context_length, **options,
    )  # fmt: skip


def _factor(scheme: schemes.Scheme | None, settings: Settings) -> float:
    """By how much a scheme extends a model's context; 1 where it does not."""
    return 1.0 if scheme is None else float({**scheme.options(), **settings.options}.get("factor", 1.0))


def _own_config(model: Any) -> None:
    """Give a model a copy of its config: another model may share the object."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if value is shared:
                setattr(module, name, own)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as config.json can hold them."""
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in options.items()}


def _gates(module: Any, family: Family, settings: Settings, options: Mapping[str, Any]) -> RetrofitGates | None:
    """Gates for an attention module, or None where only positions change."""
    if not settings.gated:
        return None
    n_heads, n_kv_heads, width = family.layout.sizes(module)
    return RetrofitGates(n_heads, width, n_kv_heads, settings, **options)


def _warn_of_native(model: Any, family: Family, settings: Settings) -> None:
    """Warn where YaRN would choose the frequencies to stretch by another length than the model was trained at."""
    native = getattr(model.config, "max_position_embeddings", None)
    if settings.base == "yarn" and family.layout.rotary and native not in (None, settings.context_length):
        log.warning(
            "context_length: yarn takes the model's own context to choose which frequencies to stretch; got T = %d, "
            "expected max_position_embeddings = %d",
            settings.context_length, native,
        )  # fmt: skip


def _warn_of_dropout(module: Any) -> None:
    dropouts = (getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout"))
    # A number, or the module that applies it.
    dropout = max(float(getattr(each, "p", each) or 0.0) for each in dropouts)
    if dropout:
        log.warning("attention dropout (p = %g) is not applied in layers with gates", dropout)
