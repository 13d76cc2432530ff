"""Which major of `transformers` runs."""

from __future__ import annotations

import transformers

#: Transformers 4: blocks of GPT-2 are not told positions, caches are told them, `sdpa` leaves caps away.
OLD = int(transformers.__version__.split(".")[0]) < 5
