"""Wrong values of arguments, one test for each."""

from __future__ import annotations

import pytest


def each_wrong(**values: tuple[object, ...]) -> pytest.MarkDecorator:
    """A test with `argument` and `value` for each of the wrong values of each argument."""
    pairs = [(argument, value) for argument, given in values.items() for value in given]
    return pytest.mark.parametrize(("argument", "value"), pairs)
