"""A causal language model of `transformers` behind the interface of :class:`gape.GPT`.

The trainer, the perplexity and the analysis of this library read models through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from gape.gates import GAPEGates
from gape.hf import masks
from gape.hf.families import TRANSFORMERS_4
from gape.hf.gates import MODULE
from gape.hf.modeling_gape import GapeForCausalLM
from gape.models.gpt import GPT, Output
from gape.models.loss import IGNORED, mean_loss, sliced_cross_entropy, summed_cross_entropy, token_cross_entropy
from gape.utils.validation import invalid_argument


class DenseCache(DynamicCache):  # type: ignore[misc]
    """A cache that keeps all keys and can say how many bytes they take."""

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys and values."""
        return sum(x.nbytes for layer in self.layers if layer.keys is not None for x in (layer.keys, layer.values))


class LanguageModel(nn.Module):
    """Wraps a causal language model of `transformers` or a :class:`gape.hf.GapeForCausalLM`, under the prefix `model.`.

    Raises:
        ValueError: it has no output layer.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        if self._gpt is None and model.get_output_embeddings() is None:
            raise invalid_argument("model", type(model).__name__, "a model with an output layer over a vocabulary")

    @property
    def _gpt(self) -> GPT | None:
        """The GPT in a GapeForCausalLM: its embedding may be its output layer, and it is not a base model."""
        return self.model.gpt if isinstance(self.model, GapeForCausalLM) else None

    @property
    def config(self) -> Any:
        """The model's config, which has `to_dict`."""
        return self.model.config

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Any = None,
        logits_to_keep: int | None = None,
        weights: Tensor | None = None,
    ) -> Output:
        """Logits, or the mean loss over targets that count and no logits; arguments as in :meth:`gape.GPT.forward`.

        The cache is one of `transformers`, such as :meth:`new_cache` gives or a :class:`gape.hf.ForgettingCache`.

        Raises:
            ValueError: documents are given; pack them by positions that restart.
        """
        x = self.hidden(ids, positions, documents, cache)
        if targets is None:
            return Output(self.logits(x[:, -(logits_to_keep or 0) :]), None)
        if targets.size(1) != x.size(1):
            x = x[:, x.size(1) - targets.size(1) :]
        weight = self._plain_head()
        total = (
            summed_cross_entropy(self.logits(x), targets, weights)
            if weight is None
            else sliced_cross_entropy(x, weight, targets, weights)
        )
        return Output(x.new_empty(x.size(0), 0, self.config.vocab_size), mean_loss(total, targets, weights))

    def hidden(
        self, ids: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """What the output layer reads: ids (B, N) → (B, N, E)."""
        if documents is not None:
            raise invalid_argument("documents", documents, "None; positions that restart keep documents apart")
        if positions is not None and positions.dim() == 1:
            positions = positions.unsqueeze(0)
        # Without a mask of pads, transformers 4 makes a dense mask for positions that it counted itself, and
        # transformers 5 takes positions that skip for those of packed documents.
        counts = TRANSFORMERS_4 if positions is None else masks.rising(positions)
        real = torch.ones_like(ids) if counts and cache is None else None
        read = self.model.base_model if self._gpt is None else self.model.states
        output = read(
            input_ids=ids,
            attention_mask=real,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        x: Tensor = output.last_hidden_state
        return x

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The cross entropy of each target of x (B, N, E), without gradients: (B, N), 0 where it is −100."""
        weight = self._plain_head()
        if weight is not None:
            return token_cross_entropy(x, weight, targets)
        with torch.no_grad():
            logits = self.logits(x).float().flatten(0, 1)
            losses = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view(targets.shape)

    def new_cache(self, capacity: int = 0) -> DenseCache:
        """An empty cache for :meth:`hidden`; it grows by itself."""
        return DenseCache(config=self.config)

    def gates(self) -> Iterator[tuple[int, GAPEGates]]:
        """(number, gates) of every layer that has gates."""
        if self._gpt is not None:
            yield from self._gpt.gates()
        for module in self.model.modules():
            gates = getattr(module, MODULE, None)
            if isinstance(gates, GAPEGates):
                yield module.layer_idx, gates

    def logits(self, x: Tensor) -> Tensor:
        """The output layer alone: x (B, N, E) → (B, N, V)."""
        if self._gpt is not None:
            return self._gpt.logits(x)
        logits: Tensor = self.model.get_output_embeddings()(x)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _plain_head(self) -> Tensor | None:
        """The output layer's weight where it is a matrix and nothing more."""
        if self._gpt is not None:
            return self._gpt.output_weight
        head = self.model.get_output_embeddings()
        capped = getattr(self.config, "final_logit_softcapping", None) is not None
        plain = type(head) is nn.Linear and head.bias is None and not capped
        return head.weight if plain else None
