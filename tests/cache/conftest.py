"""Tiny models gain nothing from threads, and lose much to them on a busy machine."""

from tests.models.conftest import one_thread

__all__ = ["one_thread"]
