"""Read models of `transformers` from folders that nobody has checked.

Code in such a folder never runs. The sizes in its config are compared with its weights before `transformers` allocates
anything of that size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from gape.utils.validation import invalid_argument

#: Keys of a config that say how many modules there are, and how large their tensors.
_COUNT = re.compile(r"(num|n)_.*layers?")
_SIZE = re.compile(r"layer|expert|head|size|dim|embd|inner|width")
#: Keys of a config below which numbers are no sizes.
_NO_SIZES = ("quantization_config", "label2id", "id2label", "task_specific_params")


class Weights(NamedTuple):
    """An upper bound of what the weights in a folder hold: tensors, and numbers in them."""

    tensors: int
    elements: int


def read(kind: Any, name: Any, **options: Any) -> Any:
    """`kind.from_pretrained(name)`, for an Auto class of `transformers`; a ValueError says why not, in one line."""
    try:
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    # The errors that a damaged config or file leads to have no class of their own.
    except Exception as error:
        raise _unreadable(name, error, "config.json" if kind is AutoConfig else "") from error


def read_config(name: str) -> Any:
    """The config of a folder or hub name; refused where it asks for more than the weights beside it hold."""
    refuse_sizes(Path(name))
    return read(AutoConfig, name)


def read_model(name: str, **options: Any) -> Any:
    """A causal language model from a folder, or from a name on the hub.

    A ValueError where it cannot be read, its config asks for more than its weights hold, or some of those are missing.
    """
    weights = refuse_sizes(Path(name))
    if weights is not None:
        parameters = _parameters(name, read(AutoConfig, name))
        if parameters > weights.elements:
            expected = f"at most {weights.elements:,}, those in its weights"
            raise invalid_argument(f"{name}/config.json", f"{parameters:,} numbers", expected)
    model, info = read(AutoModelForCausalLM, name, output_loading_info=True, **options)
    if info["missing_keys"]:
        raise ValueError(f"model: {name!r} cannot be read: {sorted(info['missing_keys'])[0]} is missing in its weights")
    return model


def refuse_sizes(folder: Path) -> Weights | None:
    """Refuse a folder whose config names sizes beyond what its weights can hold; None without a config or weights."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise invalid_argument(str(file), config, "an object of settings")
    weights = _weights(folder, packed="quantization_config" in config)
    for key, value in _numbers(config):
        bound = 2**31 if weights is None else weights.tensors if _COUNT.fullmatch(key) else weights.elements
        # Torch refuses negative sizes; a negative number of layers would be a model without any.
        if _SIZE.search(key) and (value > bound or (value < 0 and _COUNT.fullmatch(key))):
            raise invalid_argument(f"{file}: {key}", value, f"a number from 0 to {bound:,}, what its weights can hold")
    return weights


def _weights(folder: Path, *, packed: bool) -> Weights | None:
    files = sorted(folder.glob("*.safetensors"))
    if not files or packed:
        # A number takes at least a bit.
        size = 8 * sum(file.stat().st_size for file in files or folder.glob("*.bin"))
        return Weights(size, size) if size else None
    shapes: list[list[int]] = []
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                shapes += [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
        except Exception as error:
            raise _unreadable(folder, error, file.name) from error
    return Weights(len(shapes), sum(math.prod(shape) for shape in shapes))


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Whole numbers of a config at any depth, each with its key, those that may be sizes."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in _NO_SIZES:
                yield from _numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value


def _parameters(name: str, config: Any) -> int:
    """Numbers in the parameters of a model of that config; it takes no memory."""
    try:
        with torch.device("meta"):
            return int(AutoModelForCausalLM.from_config(config, trust_remote_code=False).num_parameters())
    except Exception as error:
        raise _unreadable(name, error, "config.json") from error


def _unreadable(name: Any, error: Exception, file: str = "") -> ValueError:
    words = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"model: {str(name)!r} cannot be read: {f'{file}: ' * bool(file)}{words[:500]}")
