"""What a page shows of one text, computed from a model: a view, and finer parts of maps on demand.

A layer is summed up while the model runs. Weights exist for a block of queries at a time.

Shapes: N tokens, Hq / Hk query / key heads, G = Hq / Hk, S cells along a side of a map.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.analysis.routing import score_bounds
from gape.analysis.tap import Attended, tap
from gape.cache.bounds import Limits
from gape.cache.eviction import Account, Bounds, Candidates
from gape.explore.view import (
    EPS,
    FORMAT,
    KINDS,
    LEAST_WEIGHT,
    NEVER,
    TILE,
    VERSION,
    Bytes,
    View,
    cell_size,
    levels,
    weight_bytes,
)  # fmt: skip
from gape.gates import GAPEGates
from gape.ops import inputs
from gape.ops.paged import PAGE, page_layout
from gape.utils.validation import invalid_argument

#: Weights in memory at once: few enough for a processor's cache.
_BLOCK = 2**20
#: Next tokens that are stored for each position, and positions whose logits exist at once.
_PREDICTIONS, _ROWS = 5, 256
#: What a ForgettingCache adds to bounds that it measures, and the dtype that bytes are counted in.
_MARGIN, _CACHED = 0.125, torch.bfloat16
#: In the place of −∞, which would make NaN of a product with zero.
_HIDDEN = -1e30
#: Strips of tiles that are kept: those of a screen at a few levels.
_STRIPS = 24

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Tokens that the page underlines: the first, how many, and what they are."""

    start: int
    length: int
    label: str


@dataclass
class Exploration:
    """A view of every head at 256 × 256 cells, and what its layers attended with, for :meth:`tile` and :meth:`row`."""

    view: View
    layers: list[Attended] = field(repr=False)

    def __post_init__(self) -> None:
        # Weights use every core already; two tiles at once would only take twice the memory.
        self._lock = threading.Lock()
        self._strip = lru_cache(_STRIPS)(self._computed_strip)

    @property
    def n_heads(self) -> int:
        """Query heads of a layer."""
        return self.layers[0].q.size(1)

    def tile(self, kind: str, layer: int, head: int, level: int, row: int, column: int) -> Bytes:
        """A part of a map, (256, 256): each cell has the largest attention of its queries to its keys.

        `kind` is "gated", or "plain" with the layer's gates at zero; cells have :func:`gape.explore.view.cell_size` >>
        level tokens; row and column count tiles from the first query and key. Others than there are, are refused.
        """
        sizes = dict(levels(self.view.header["tokens"]))
        self._check(kind, layer, head)
        across = 0 if level not in sizes else -(-self.view.header["tokens"] // (sizes[level] * TILE))
        if not 0 <= row < across or not 0 <= column < across:
            raise invalid_argument("tile", (level, row, column), f"one of {len(sizes)} levels, inside the text")
        with self._lock:
            cells = self._strip(kind, layer, head, sizes[level], row)[:, column * TILE : (column + 1) * TILE]
        return np.pad(cells, ((0, TILE - cells.shape[0]), (0, TILE - cells.shape[1])))

    def row(self, kind: str, layer: int, head: int, query: int) -> Bytes:
        """The attention of one query to every token of the text, (N,), as bytes of a map; refuses other queries."""
        n = int(self.view.header["tokens"])
        self._check(kind, layer, head)
        if not 0 <= query < n:
            raise invalid_argument("query", query, f"a number from 0 to {n - 1}")
        weights, _ = HeadRows(self.layers[layer], head, kind == "gated").weights(query, query + 1)
        return np.pad(weight_bytes(weights[0].cpu().numpy()), (0, n - weights.size(1)))

    def _check(self, kind: str, layer: int, head: int) -> None:
        if kind not in KINDS or not 0 <= layer < len(self.layers) or not 0 <= head < self.n_heads:
            expected = f"gated or plain, {len(self.layers)} layers of {self.n_heads} heads"
            raise invalid_argument("head", (kind, layer, head), expected)

    def _computed_strip(self, kind: str, layer: int, head: int, cell: int, row: int) -> Bytes:
        """All tiles of a row of tiles side by side, (cells of queries, cells of keys)."""
        n, rows_of = int(self.view.header["tokens"]), HeadRows(self.layers[layer], head, kind == "gated")
        first, last = row * TILE * cell, min((row + 1) * TILE * cell, n)
        block = max(1, _BLOCK // n // cell) * cell
        rows = []
        for start in range(first, last, block):
            cells = pooled(rows_of.weights(start, min(start + block, last))[0], cell)
            rows.append(F.pad(cells, (0, -(-n // cell) - cells.size(-1))))
        return weight_bytes(torch.cat(rows).cpu().numpy())


@torch.no_grad()
def explore(
    model: Any,
    ids: Tensor,
    decode: Callable[[int], str],
    *,
    title: str,
    about: dict[str, Any],
    marks: Sequence[Mark] = (),
    sources: Tensor | None = None,
    progress: Progress = lambda layers: None,
) -> Exploration:
    """Read a text and sum up what every layer and head does with it.

    Args:
        model: a :class:`gape.GPT`, or a :class:`gape.hf.LanguageModel` around a model of transformers with gates, in
            eval mode.
        ids: integer (1, N), N ≥ 2, on the model's device; `decode` gives the text of one.
        title, about, marks: what the page says of the model and the text; `about` is plain JSON.
        sources: int64 (N,), for each query the key that holds what it should retrieve, −1 for none. None takes the
            token that followed the last earlier occurrence of the query's own token.
        progress: called with the number of layers that are done.

    Raises:
        ValueError: a model that :func:`gape.analysis.tap` refuses, or fewer than two tokens.
    """
    if ids.dim() != 2 or ids.size(0) != 1 or ids.size(1) < 2:
        raise invalid_argument("ids", ids, "(1, N) with at least two tokens")
    wanted = followers(ids[0]) if sources is None else sources.to(ids.device)
    layers: list[Attended] = []
    parts: list[dict[str, npt.NDArray[Any]]] = []

    def receive(index: int, attended: Attended) -> None:
        visibility = attended.visibility
        if visibility.attn_mask is None and visibility.q_documents is None:
            # Positions are those of the tensors; said so, later keys are not computed.
            attended = replace(attended, visibility=inputs.visibility(attended.q, attended.k))
        layers.append(attended)
        parts.append(_layer_arrays(layers[-1], wanted))
        progress(len(layers))

    with tap(model, receive):
        hidden = model.hidden(ids)
    arrays = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    next_ids, arrays["next_probability"] = _predictions(model, hidden)
    texts = _Vocabulary(decode)
    if layers[0].gates is not None:
        with gates_off(model):
            plain_ids, arrays["plain_probability"] = _predictions(model, model.hidden(ids))
        arrays["plain"] = texts.places(plain_ids)
    arrays |= {"token": texts.places(ids[0].cpu().numpy()), "next": texts.places(next_ids)}
    width = layers[0].k.size(-1)
    # Of a key with its value, exposure and position in the pages of a cache.
    bytes_per_key = page_layout(width, width, _CACHED).nbytes // PAGE
    gated = layers[0].gates is not None
    sizes = {
        "layers": len(layers), "n_heads": layers[0].q.size(1), "n_kv_heads": layers[0].k.size(1), "head_dim": width,
        "context_length": layers[0].context_length if gated else None,
    }  # fmt: skip
    header = {
        "format": FORMAT, "version": VERSION, "title": title, "model": about | sizes, "tokens": ids.size(1),
        "gated": gated, "tile": TILE, "cell": cell_size(ids.size(1)),
        "least_weight": LEAST_WEIGHT, "eps": list(EPS), "bytes_per_key": bytes_per_key, "vocabulary": texts.known,
        "marks": [vars(mark) for mark in marks], "retrieval": "repeats" if sources is None else "answer", "full": {},
    }  # fmt: skip
    return Exploration(View(header, arrays), layers)


def followers(ids: Tensor) -> Tensor:
    """For each token of ids (N,), the place behind the last earlier occurrence of the same token; −1 without one."""
    last: dict[int, int] = {}
    places = []
    for at, token in enumerate(ids.tolist()):
        before = last.get(token, at)
        places.append(before + 1 if before + 1 < at else -1)
        last[token] = at
    return torch.tensor(places, device=ids.device)


def pooled(weights: Tensor, cell: int) -> Tensor:
    """The largest of each cell × cell weights of (…, queries, keys); cells at the end may be smaller."""
    if cell == 1:
        return weights
    rows, columns = weights.shape[-2:]
    padded = F.pad(weights, (0, -columns % cell, 0, -rows % cell))
    across = padded.view(*padded.shape[:-1], -1, cell).amax(-1)
    return across.view(*across.shape[:-2], -1, cell, across.size(-1)).amax(-2)


@contextmanager
def gates_off(model: nn.Module) -> Iterator[None]:
    """While open, every amplitude of a model is zero, so that its gates change nothing."""
    gates = [module for module in model.modules() if isinstance(module, GAPEGates)]
    before = [each.raw_amplitude.detach().clone() for each in gates]
    try:
        for each in gates:
            each.raw_amplitude.data.fill_(-torch.inf)
        yield
    finally:
        for each, values in zip(gates, before, strict=True):
            each.raw_amplitude.data.copy_(values)


def _layer_arrays(attended: Attended, sources: Tensor) -> dict[str, npt.NDArray[Any]]:
    """The arrays of one layer."""
    arrays = _maps(attended, sources, "gated")
    if attended.gates is None or attended.gate is None or attended.landmark is None or attended.rate is None:
        return arrays
    arrays |= _maps(attended, sources, "plain")
    arrays["gate"], arrays["gate_range"] = _log_bytes(attended.gate[0])
    arrays["score"], arrays["score_range"] = _log_bytes(score_bounds(attended)[0])
    arrays["landmark"] = (255 * attended.landmark[0]).round().to(torch.uint8).cpu().numpy()
    arrays["rate_per_gate"] = (attended.gates.amplitude / attended.context_length).float().cpu().numpy()
    arrays["horizon"] = (1 / attended.rate[0].double().mean(-1)).float().cpu().numpy()
    arrays["density"] = (attended.landmark[0] > 0.5).float().mean(-1).cpu().numpy()
    arrays["evicted_at"], arrays["floor"] = _evicted_at(attended, attended.gates, attended.rate, attended.landmark)
    return arrays


def _maps(attended: Attended, sources: Tensor, kind: str) -> dict[str, npt.NDArray[Any]]:
    """The map, the mean entropy and the retrieval score of every head."""
    heads, n = attended.q.size(1), attended.visibility.n_q
    cell = cell_size(n)
    block = max(1, _BLOCK // n // cell) * cell
    cells = torch.zeros(heads, -(-n // cell), -(-n // cell))
    entropy, retrieved = (torch.zeros(heads, device=attended.q.device) for _ in range(2))
    for head in range(heads):
        rows_of = HeadRows(attended, head, kind == "gated")
        for start in range(0, n, block):
            weights, spread = rows_of.weights(start, min(start + block, n))
            part = pooled(weights, cell).cpu()
            cells[head, start // cell : start // cell + part.size(0), : part.size(1)] = part
            wanted = sources[start : start + block]
            rows = (wanted >= 0).nonzero()[:, 0]
            retrieved[head] += weights[rows, wanted[rows]].sum()
            entropy[head] += spread.sum()
    count = max(1, int((sources >= 0).sum()))
    return {
        f"map_{kind}": weight_bytes(cells.numpy()), f"entropy_{kind}": (entropy / n).cpu().numpy(),
        f"retrieval_{kind}": (retrieved / count).cpu().numpy(),
    }  # fmt: skip


def _log_bytes(values: Tensor) -> tuple[Bytes, npt.NDArray[Any]]:
    """Values (H, N) above 0 as bytes, evenly by logarithm between the least and the largest of each head (H, 2)."""
    logs = values.double().clamp(min=1e-30).log()
    low, high = logs.amin(-1, keepdim=True), logs.amax(-1, keepdim=True)
    scaled = 255 * (logs - low) / (high - low).clamp(min=1e-9)
    ends = torch.cat((low, high), dim=-1).exp().float().cpu().numpy()
    return scaled.round().to(torch.uint8).cpu().numpy(), ends


def _evicted_at(attended: Attended, gates: GAPEGates, rate: Tensor, landmark: Tensor) -> tuple[Bytes, Bytes]:
    """For each key (Hk, N) the first of :data:`EPS` at which a cache may evict it behind the text; floors (Hk,) bool.

    The rule is that of :class:`gape.cache.eviction.Account`, under bounds measured on the queries of this text. A head
    without a floor is judged as if no later query forgot more slowly than these; a cache would evict none of its keys.
    """
    q, k = attended.q[0].double(), attended.k[0].double()
    heads, n = k.shape[:2]
    groups = q.size(0) // heads
    floors = gates.floors(q.device) * gates.amplitude.float() / attended.context_length
    least = torch.where(floors > 0, floors, rate[0].amin(-1).float()).double()
    own = (-attended.scale * (q * k.repeat_interleave(groups, dim=0)).sum(-1)).amax(-1)
    own = own + _MARGIN * own.abs()
    reach = attended.scale * q.norm(dim=-1).amax(-1) * (1 + _MARGIN)
    limits = Limits(least, reach, own, own.abs()).rounded(_CACHED)
    bounds = Bounds(*(x.view(heads, groups) for x in (limits.rate, limits.reach, limits.own)))
    every = torch.arange(heads, device=q.device)
    keys = Candidates(
        sequences=every, norm=k.norm(dim=-1), exposure=1 - landmark[0],
        positions=torch.arange(n, device=q.device), valid=torch.ones(heads, n, dtype=torch.bool, device=q.device),
    )  # fmt: skip
    first = torch.full((heads,), NEVER, dtype=torch.uint8, device=q.device)[:, None].repeat(1, n)
    for number, eps in reversed(list(enumerate(EPS))):
        # Half of eps, as the cache does: the other half is for what is evicted while the text is read.
        account = Account(eps / 2, heads, groups, q.device)
        account.advance(bounds, torch.full((heads,), n, device=q.device), every)
        first = first.masked_fill(~account.evict(keys), number)
    return first.cpu().numpy(), (floors.view(heads, groups) > 0).all(-1).to(torch.uint8).cpu().numpy()


def _predictions(model: Any, hidden: Tensor) -> tuple[npt.NDArray[Any], Bytes]:
    """Ids (N, P) of the most likely next tokens of each position, and their probabilities in 255ths."""
    ids, shares = [], []
    for start in range(0, hidden.size(1), _ROWS):
        likely = model.logits(hidden[:, start : start + _ROWS])[0].float().softmax(-1)
        best = likely.topk(min(_PREDICTIONS, likely.size(-1)), dim=-1)
        ids.append(best.indices)
        shares.append((255 * best.values).round().to(torch.uint8))
    return torch.cat(ids).cpu().numpy(), torch.cat(shares).cpu().numpy()


class _Vocabulary:
    """The texts of the tokens that a view speaks of, each once."""

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode
        self._places: dict[int, int] = {}
        self.known: list[str] = []

    def places(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Where the texts of ids are in `known`, in the shape of ids."""
        for token in np.unique(ids).tolist():
            if token not in self._places:
                self._places[token] = len(self.known)
                self.known.append(self._decode(token))
        places: npt.NDArray[np.int32] = np.vectorize(self._places.__getitem__, otypes=[np.int32])(ids)
        return places


class HeadRows:
    """Attention weights of one query head of a layer, for one sequence; `gated` says whether its gates count.

    The gates' bias −c_i · u_j · (i − j) is a product of two coordinates of q and k, so one product of matrices gives
    whole logits. That is the paper's factorisation in float32, with positions counted from the block, where it is exact
    enough.
    """

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
