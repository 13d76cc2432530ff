"""What trained models attend to: attention by blocks of queries, entropy, gates and horizons."""

from gape.analysis.entropy import Statistics, statistics
from gape.analysis.maps import attention_map
from gape.analysis.tap import Attended, attended, tap

__all__ = ["Attended", "Statistics", "attended", "attention_map", "statistics", "tap"]
