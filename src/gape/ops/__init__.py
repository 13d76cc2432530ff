"""One operator, several implementations that agree. `docs/guide/operator.md` tells them apart."""

from gape.ops.api import Plan, available_implementations, detailed_attention, explain, gated_attention
from gape.ops.implementations import Details
from gape.ops.plain import attention

__all__ = [
    "Details",
    "Plan",
    "attention",
    "available_implementations",
    "detailed_attention",
    "explain",
    "gated_attention",
]
