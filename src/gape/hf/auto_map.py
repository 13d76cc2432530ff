"""Directories that load without `import gape.hf`: the `auto_map` of config.json, and the file that it names.

With `trust_remote_code=True` the Auto classes of `transformers` import that file, which imports :mod:`gape.hf` and does
nothing else. Without the flag nothing is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gape.utils import files

#: The file beside config.json, and its names for the classes.
MODULE = "load_gape"
AUTO_MAP = {"AutoConfig": f"{MODULE}.Config", "AutoModelForCausalLM": f"{MODULE}.Model"}
_TEXT = '''"""Lets transformers load this model with trust_remote_code=True: it imports gape.hf, which wrote it."""

try:
    from gape.hf.save_load import auto_classes
except ImportError as error:
    raise ImportError("this model has gates of the package gape: pip install 'gape[hf]'") from error

Config, Model = auto_classes("{model_type}")
'''


class LocalCode:
    """Mixed into classes that the file names: their source is not copied to where they are saved."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: `transformers` would copy the module of the class into every directory."""


class AutoMapped(LocalCode):
    """Mixed into a config class: writes `auto_map` and the file that it names."""

    model_type: str

    def to_diff_dict(self) -> dict[str, Any]:
        """As in `transformers`, which writes this to config.json."""
        values: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        return {**values, "auto_map": AUTO_MAP}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in `transformers`; the class is known now, so `auto_map` has done its part."""
        values = {name: value for name, value in config_dict.items() if name != "auto_map"}
        return super().from_dict(values, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in `transformers`, and the file that `auto_map` names."""
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        files.replace(Path(save_directory) / f"{MODULE}.py", _TEXT.format(model_type=self.model_type).encode())
