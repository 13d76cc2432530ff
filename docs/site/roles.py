"""An extension of griffe: names in docstrings that Sphinx would link, :func:`inject`, are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):  # type: ignore[misc]
    """Takes the role away from names in docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(r":\w+:(?=`)", "", obj.docstring.value)
