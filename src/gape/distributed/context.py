"""Context parallelism: each process has a slice of every sequence, and attention reads the keys of all of them.

Queries stay where they are. Layer by layer, keys, values and what a scheme stores beside a key are gathered; backward,
their gradients are added up where they came from. Where attention is dense, a sequence is cut into 2K parts, and
process r has the parts r and 2K − 1 − r, so that all have as many pairs of a query and an earlier key. Where forgotten
keys are skipped, process r has part r of K, and blocks without weight are not sent (:mod:`gape.distributed.forgotten`).

Shapes: B rows, Hq and Hk heads, n tokens of a slice, N = K·n tokens of a sequence, D and Dv widths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gape.data.windows import Batch
from gape.distributed import forgotten
from gape.distributed.collectives import Traffic, gather
from gape.distributed.forgotten import softmax_scale
from gape.models.skipping import Skips
from gape.ops import attention, gated_attention
from gape.positions.base import Scheme
from gape.utils.validation import invalid_argument, weight


def context_parallel(model: nn.Module, mesh: DeviceMesh, *, eps: float = 0.0) -> ContextParallel:
    """From now on, let a model read slices of sequences, one per process of `mesh`.

    >>> context = context_parallel(model, mesh)  # doctest: +SKIP
    >>> part = context.share(Batch(ids, targets))  # doctest: +SKIP
    >>> loss = model(part.ids, targets=part.targets, positions=part.positions).loss  # doctest: +SKIP

    For training and for prefill without a cache. Loss and gradients of weights are those of the slice, to be added up
    over the processes, as DDP and FSDP do.

    Args:
        model: whose attention layers are all :class:`gape.GAPEAttention`, or all put in by :func:`gape.hf.inject`, with
            the same weights in every process.
        mesh: of one dimension, K processes.
        eps: attention that a query may lose, in each layer and head, to blocks of keys that are not sent; 0 sends all.

    Raises:
        ValueError: a layer that attends in another way; names it and says why.
    """
    return ContextParallel(layers_to_slice(model), mesh, weight("eps", eps))


def layers_to_slice(model: nn.Module) -> list[Any]:
    """The attention layers of a model, refused where one cannot be sliced; errors as :func:`context_parallel`."""
    for name, module in model.named_modules():
        reason = _refusal(module)
        if reason is not None:
            raise ValueError(f"context_parallel: {name or type(model).__name__} {reason}")
    layers = [m for m in model.modules() if isinstance(m, Skips)]
    if not layers:
        raise invalid_argument("model", type(model).__name__, "one with layers of gape, which alone can be sliced")
    return layers


def _scheme(layer: Any) -> Scheme | None:
    """The scheme of a layer; None for one of transformers, whose sides are landmarks."""
    return getattr(layer, "scheme", None)


def _attend_injected(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, landmark: Tensor | None
) -> Tensor:
    """What a layer of transformers attends with, without a mask: its own method takes fewer queries for a cache."""
    scale = softmax_scale(layer)
    if gate is None or landmark is None:
        return attention(q, k, v, scale=scale)
    return gated_attention(
        q, k, v, gate, landmark, layer.gates.amplitude, context_length=layer.context_length, scale=scale,
        **layer.how(q.size(2)),
    )  # fmt: skip


def _refusal(module: nn.Module) -> str | None:
    """Why a module cannot attend across processes; None where it can, or does not attend."""
    if isinstance(module, Skips):
        return getattr(module, "not_plain_attention", None)
    attends = type(module).__name__.endswith("Attention") and any(True for _ in module.parameters())
    return f"is a {type(module).__name__}, which attends within its slice alone" if attends else None


class ContextParallel:
    """A model under context parallelism; made by :func:`context_parallel`.

    It has slice `rank` of the K = `ways`, may lose attention `eps` to blocks that are not sent, and counts the bytes
    received in `traffic`.
    """

    def __init__(self, layers: list[Any], mesh: DeviceMesh, eps: float) -> None:
        self.group: Any = mesh.get_group()
        self.rank, self.ways = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.eps, self.traffic = eps, Traffic()
        self.skips = bool(eps) and any(layer.gates is not None and any(layer.gates.gate_floor) for layer in layers)
        # Where positions jump, transformers makes a dense mask.
        self.contiguous = self.skips or any(_scheme(layer) is None for layer in layers)
        self._layers, self._active = layers, True
        self._positions: Tensor | None = None
        self._gathered: list[tuple[Tensor, int, Tensor]] = []
        for layer in layers:
            # An attribute of the instance hides the method until it is deleted.
            vars(layer)["attend"] = partial(self._attend, layer, layer.attend)

    def remove(self) -> None:
        """Leave the model as it was."""
        for layer in self._layers:
            vars(layer).pop("attend", None)

    @contextlib.contextmanager
    def sliced(self, active: bool) -> Iterator[None]:
        """A context in which the model reads slices, as it does from the start, or whole sequences."""
        before, self._active = self._active, active
        try:
            yield
        finally:
            self._active = before

    def share(self, batch: Batch) -> Batch:
        """This process's slice of the tokens of a batch (B, N), with positions.

        N is a multiple of 2K (of K where keys are skipped), and there are as many targets; else a ValueError.
        """
        n, parts = batch.ids.size(1), self.ways if self.contiguous else 2 * self.ways
        if n % parts:
            raise invalid_argument("length", n, f"a multiple of {parts} for context_parallel = {self.ways}")
        if batch.targets.size(1) != n:
            raise invalid_argument("targets", batch.targets, f"one for each of {n} tokens under context parallelism")
        index = self._index(n, batch.ids.device)
        if batch.positions is None and (self._positions is None or self._positions.shape != index.shape):
            self._positions = index
        part = batch.mapped(lambda x: x[..., index])
        return part if batch.positions is not None else part._replace(positions=self._positions)

    def _index(self, n: int, device: torch.device) -> Tensor:
        """Which tokens of a sequence this process has, in their order."""
        if self.contiguous:
            part = n // self.ways
            return torch.arange(self.rank * part, (self.rank + 1) * part, device=device)
        part, last = n // (2 * self.ways), 2 * self.ways - 1 - self.rank
        starts = torch.tensor([self.rank * part, last * part], device=device)
        return (starts[:, None] + torch.arange(part, device=device)).flatten()

    def _attend(
        self, layer: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, side: Tensor | None,
        **arguments: Any,
    ) -> Any:  # fmt: skip
        """Attend from this process's queries to the keys of all; what `layer.attend` gives."""
        if not self._active:
            return attend(q, k, v, gate, side, **arguments)
        q_positions, q_documents = arguments["q_positions"], arguments.get("q_documents")
        if q_positions is None or k.size(2) != q.size(2) or arguments.get("attn_mask") is not None:
            given = "no positions, or a cache, a mask or fewer queries than keys"
            raise ValueError(f"context_parallel: got {given}, expected a slice")
        counted = self._positions is not None and q_positions.is_set_to(self._positions)
        documents = self._whole(q_documents)
        if counted and self.skips and gate is not None:
            k, v, side = forgotten.exchange_keys(self, layer, q, k, v, gate, side)
            pieces = [(slice(0, q.size(2)), k.size(2))]
            documents = None if documents is None else documents[:, : (self.rank + 1) * q.size(2)][:, -k.size(2) :]
        else:
            k, v, side = self._keys(layer, k, v, side)
            pieces = self._pieces(q.size(2))
        if not counted:
            if _scheme(layer) is None:
                raise invalid_argument("positions", q_positions, "those that share() gave, in a model of transformers")
            return attend(
                q, k, v, gate, side, q_positions=q_positions, k_positions=self._whole(q_positions),
                q_documents=q_documents, k_documents=documents,
            )  # fmt: skip
        outs = [self._piece(layer, attend, q, k, v, gate, side, q_documents, documents, *each) for each in pieces]
        return torch.cat(outs, dim=2), None

    def _piece(
        self, layer: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, side: Tensor | None,
        q_documents: Tensor | None, k_documents: Tensor | None, rows: slice, end: int,
    ) -> Any:  # fmt: skip
        """What a run of queries gives: they are the last of the keys up to `end`, which needs no mask."""
        sides = (None if x is None else x[:, :, part] for x, part in ((gate, rows), (side, slice(end))))
        if _scheme(layer) is None:
            return _attend_injected(layer, q[:, :, rows], k[:, :, :end], v[:, :, :end], *sides)
        documents = {}
        if q_documents is not None and k_documents is not None:
            documents = {"q_documents": q_documents[:, rows], "k_documents": k_documents[:, :end]}
        return attend(q[:, :, rows], k[:, :, :end], v[:, :, :end], *sides, **documents)[0]

    def _pieces(self, n: int) -> list[tuple[slice, int]]:
        """Runs of queries that follow one another, and where the keys that they see end."""
        if self.contiguous:
            return [(slice(0, n), (self.rank + 1) * n)]
        part = n // 2
        return [(slice(0, part), (self.rank + 1) * part), (slice(part, n), (2 * self.ways - self.rank) * part)]

    def _keys(self, layer: Any, k: Tensor, v: Tensor, side: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and sides of all tokens, in the order of the sequence."""
        both = self._ordered(gather(torch.cat([k, v], dim=-1), self.group, self.traffic), 2)
        k, v = torch.split(both, [k.size(-1), v.size(-1)], dim=-1)
        return k, v, self.gather_side(layer, side)

    def gather_side(self, layer: Any, side: Tensor | None) -> Tensor | None:
        """The side (B, H, n) of the keys of all tokens."""
        if side is None:
            return None
        scheme = _scheme(layer)
        sent = side if scheme is None else scheme.separate(side)
        whole = self._ordered(gather(sent, self.group, self.traffic), 2)
        return whole if scheme is None else scheme.accumulate(whole)

    def _whole(self, x: Tensor | None) -> Tensor | None:
        """Positions or documents (..., n) of all tokens; gathered once for all layers."""
        if x is None:
            return None
        for mine, version, whole in self._gathered:
            if x.is_set_to(mine) and x._version == version:
                return whole
        whole = self._ordered(gather(x, self.group, self.traffic), x.dim() - 1)
        # The local one is kept too: its memory is not used again while it says which one was gathered.
        self._gathered = [*self._gathered[-1:], (x, x._version, whole)]
        return whole

    def _ordered(self, parts: Tensor, dim: int) -> Tensor:
        """(K, ...) of all processes, one after the other along a dimension of the parts."""
        if self.contiguous:
            return torch.cat(parts.unbind(), dim)
        heads, tails = zip(*(part.chunk(2, dim) for part in parts.unbind()), strict=True)
        return torch.cat([*heads, *reversed(tails)], dim)
