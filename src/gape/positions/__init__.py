"""Positional schemes: `build` one by name. `docs/guide/positions.md` lists them."""

from gape.positions.base import Scheme
from gape.positions.gated import Gated
from gape.positions.registry import available, build, is_gated, register, unregister
from gape.positions.rotary import Rotary

__all__ = [
    "Gated",
    "Rotary",
    "Scheme",
    "available",
    "build",
    "is_gated",
    "register",
    "unregister",
]
