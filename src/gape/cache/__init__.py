"""Caches of keys and values: full ones, and ones that evict keys with a proven bound."""
