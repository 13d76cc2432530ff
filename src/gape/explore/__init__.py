"""The explorer: a page in the browser that shows what gates do to a text.

:func:`show` puts the page into a notebook; :mod:`gape.explore.view` has the format of its data. Names are imported when
they are first used, so the page of a stored view needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gape.explore.exploration import Exploration, explore
    from gape.explore.export import page
    from gape.explore.notebook import show
    from gape.explore.view import View

_HOMES = {
    "Exploration": "exploration", "View": "view", "explore": "exploration", "page": "export", "show": "notebook",
}  # fmt: skip

__all__ = ["Exploration", "View", "explore", "page", "show"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"gape.explore.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gape.explore' has no attribute {name!r}")
