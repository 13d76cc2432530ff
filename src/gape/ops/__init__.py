"""One operator, several implementations that agree. `docs/operator.md` tells them apart."""

from gape.ops.api import Plan, available_implementations, explain, gated_attention
from gape.ops.plain import attention

__all__ = ["Plan", "attention", "available_implementations", "explain", "gated_attention"]
