"""The attention of one head, some queries at a time, with few passes over memory.

The gates' bias −c_i · u_j · (i − j) is a product of two coordinates of q and k, so one product of matrices gives whole
logits. That is the paper's factorisation in float32, with positions counted from the block, where it is exact enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gape.analysis.tap import Attended

#: In the place of −∞, which would make NaN of a product with zero.
_HIDDEN = -1e30


class HeadRows:
    """Attention weights of one query head of a layer, for one sequence; `gated` says whether its gates count."""

    def __init__(self, attended: Attended, head: int, gated: bool) -> None:
        self._attended, self._head = attended, head
        self._direct = attended.adds_bias or not attended.visibility.index_order
        shared = head // (attended.q.size(1) // attended.k.size(1))
        self._q, self._k = attended.scale * attended.q[0, head].float(), attended.k[0, shared].float()
        self._rate = self._exposure = None
        if gated and attended.rate is not None and attended.landmark is not None:
            self._rate, self._exposure = attended.rate[0, head].float(), 1 - attended.landmark[0, shared].float()
            self._q, self._k = (torch.cat((x, x.new_zeros(len(x), 2)), dim=-1) for x in (self._q, self._k))
            self._k[:, -2] = self._exposure

    @torch.no_grad()
    def weights(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Attention of queries start … stop − 1 to keys 0 … stop − 1, (queries, keys), and entropy (queries,), float32.

        Where positions are not those of the tensors, to all keys.
        """
        if self._direct:
            weights = self._attended.weights(start, stop, self._head)[0, 0].float()
            return weights, torch.special.entr(weights).sum(-1)
        logits = self._logits(start, stop)
        logits[:, start:].masked_fill_(torch.ones_like(logits[:, start:], dtype=torch.bool).triu(1), _HIDDEN)
        weights = logits.softmax(-1)
        # log Σ exp a from the largest logit and its weight; the entropy is that less the mean logit.
        total = logits.amax(-1) - weights.amax(-1).log()
        return weights, total - torch.linalg.vecdot(weights, logits)

    def _logits(self, start: int, stop: int) -> Tensor:
        if self._rate is None or self._exposure is None:
            return self._q[start:stop] @ self._k[:stop].T
        q, rate = self._q[start:stop], self._rate[start:stop]
        q[:, -2] = -rate * torch.arange(stop - start, device=q.device)
        q[:, -1] = rate
        self._k[:stop, -1] = self._exposure[:stop] * torch.arange(-start, stop - start, device=q.device)
        return q @ self._k[:stop].T
