"""Models that read prompts: ours, and those of `transformers` through a thin adapter.

Batches hold rows of unequal length. Losses are read with pads behind a row, which nothing before them sees; text is
generated with pads before it, which have positions and a document of their own. Long rows are read in chunks with a
cache, and logits exist for answers only.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gape.tasks.perplexity import window_losses

if TYPE_CHECKING:
    from gape.data import Tokenizer
    from gape.models.gpt import GPT

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Reader(ABC):
    """A model in eval mode with its tokenizer, which reads prompts in chunks of tokens, in bfloat16 where `low`.

    Attributes:
        limit: tokens that it can read; None for any number.
        forgetting: makes an empty cache that evicts; None for the model's own caches.
            :meth:`gape.tasks.ways.Way.apply` gives it.
    """

    limit: int | None = None
    forgetting: Callable[[], Any] | None = None

    def __init__(self, model: Any, chunk: int, *, low: bool = False) -> None:
        self.model, self.chunk, self.low = model, chunk, low
        self.device = next(model.parameters()).device

    @abstractmethod
    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """The ids of a text, with what the tokenizer puts before every text where this is the `start` of one."""

    def encode_all(self, texts: Sequence[str], *, start: bool = True) -> list[list[int]]:
        """The ids of several texts, each as :meth:`encode` gives them."""
        return [self.encode(text, start=start) for text in texts]

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text of generated ids."""

    @abstractmethod
    def chat(self, text: str) -> str:
        """A prompt as a user's turn in the model's own chat template; refused where it has none."""

    @abstractmethod
    def complete(self, prompts: Sequence[Ids], budget: int) -> list[list[int]]:
        """The likeliest next tokens of each prompt, up to a budget or an end of text, which is left out."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What identifies tokenizer and weights."""

    def language_model(self) -> Any:
        """The model with the interface of :class:`gape.GPT`."""
        return self.model

    def losses(self, prompts: Sequence[Ids], answers: Sequence[Ids]) -> list[Floats]:
        """The loss in nats of every token of each answer behind its prompt."""
        ids = pad([np.concatenate(pair) for pair in zip(prompts, answers, strict=True)], left=False)
        first = min(len(prompt) for prompt in prompts) - 1
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.low):
            losses = window_losses(
                self.language_model(), torch.from_numpy(ids).to(self.device), ids.shape[1] - 1 - first,
                chunk=self.chunk, forgetting=self.forgetting,
            )  # fmt: skip
        each = losses.double().cpu().numpy()
        starts = [len(prompt) - 1 - first for prompt in prompts]
        return [row[at : at + len(answer)] for row, at, answer in zip(each, starts, answers, strict=True)]


class GPTReader(Reader):
    """One of our models, in eval mode, with the tokenizer of its ids."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, *, low: bool = False, chunk: int = 16384) -> None:
        super().__init__(model, chunk, low=low)
        self.tokenizer = tokenizer

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """The ids of a text; nothing is put before it, as in training."""
        return self.tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return self.tokenizer.decode(ids)

    def chat(self, text: str) -> str:
        """Refuses: our models have no chat template."""
        raise ValueError("template: got 'chat', expected 'base': this model knows no chat")

    @torch.no_grad()
    def complete(self, prompts: Sequence[Ids], budget: int) -> list[list[int]]:
        """See :class:`Reader`."""
        ids = torch.from_numpy(pad(prompts, left=True)).to(self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        positions, documents = _left_pad_positions(ids, lengths)
        cache = self.model.new_cache(ids.size(1) + budget) if self.forgetting is None else self.forgetting()
        ends = set() if self.tokenizer.end_of_text is None else {self.tokenizer.end_of_text}
        new: list[Tensor] = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.low):
            for start in range(0, ids.size(1), self.chunk):
                part = slice(start, start + self.chunk)
                own = (None if each is None else each[:, part] for each in (positions, documents))
                x = self.model.hidden(ids[:, part], *own, cache=cache)
            while True:
                new.append(self.model.logits(x[:, -1:])[:, -1].argmax(-1, keepdim=True))
                rows = torch.cat(new, dim=1).tolist()
                if len(new) >= budget or all(ends.intersection(row) for row in rows):
                    return [_until(row, ends) for row in rows]
                positions = None if positions is None else positions[:, -1:] + 1
                # A single token is no pad, but the model's own caches go on as they began.
                documents = None if documents is None or self.forgetting is not None else documents[:, -1:]
                x = self.model.hidden(new[-1], positions, documents, cache=cache)

    def identity(self) -> dict[str, Any]:
        """See :class:`Reader`."""
        config = self.model.config
        return {
            "kind": "gape", "size": f"GPT-{config.n_layer}x{config.n_embd}", "config": config.to_dict(),
            "parameters": self.model.count_parameters(), "weights": weights_digest(self.model),
            "tokenizer": self.tokenizer.identity(),
        }  # fmt: skip


class TransformersReader(Reader):
    """A causal model of `transformers` in eval mode with its own tokenizer, called `name` in rows."""

    def __init__(self, model: Any, tokenizer: Any, name: str, *, chunk: int = 16384) -> None:
        super().__init__(model, chunk)
        self.tokenizer, self.name = tokenizer, name
        limit = getattr(model.config, "max_position_embeddings", None)
        # In our models it is the training length, which is no limit.
        self.limit = limit if isinstance(limit, int) and not model.config.model_type.startswith("gape_") else None
        # The special tokens before a text, read off a short one; those after it are left out.
        marked, plain = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
        places = range(len(marked) - len(plain) + 1)
        self._before = marked[: next((n for n in places if marked[n : n + len(plain)] == plain), 0)]

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts before it and none behind."""
        return self.encode_all([text], start=start)[0]

    def encode_all(self, texts: Sequence[str], *, start: bool = True) -> list[list[int]]:
        """The ids of several texts, which fast tokenizers encode side by side."""
        before = self._before if start else []
        encoded = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return [before + list(ids) for ids in encoded]

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return str(self.tokenizer.decode(ids))

    def chat(self, text: str) -> str:
        """See :class:`Reader`."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(f"template: got 'chat', expected 'base': {self.name} has no chat")
        turn = [{"role": "user", "content": text}]
        return str(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    def language_model(self) -> Any:
        """See :class:`Reader`."""
        from gape.hf import LanguageModel  # noqa: PLC0415

        return LanguageModel(self.model)

    @property
    def ends(self) -> set[int]:
        """The tokens that end a text."""
        end = self.model.generation_config.eos_token_id
        return {end} if isinstance(end, int) else set(end or ())

    def complete(self, prompts: Sequence[Ids], budget: int) -> list[list[int]]:
        """See :class:`Reader`."""
        options: dict[str, Any] = {"do_sample": False}
        if self.forgetting is not None:
            options["past_key_values"] = self.forgetting()
        ends = self.ends
        return [_until(row, ends) for row in self.generate(prompts, budget, **options)]

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int] | Ids], budget: int, **options: Any) -> list[list[int]]:
        """The next tokens of each prompt; behind an end of text come pads. Options are those of transformers."""
        ids = torch.from_numpy(pad(prompts, left=True)).to(self.device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            mask[row, ids.size(1) - len(prompt) :] = 1
        if ids.size(1) > self.chunk:
            options["prefill_chunk_size"] = self.chunk
        generated = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=budget, num_beams=1,
            pad_token_id=next(iter(self.ends), 0), **options,
        )  # fmt: skip
        new: list[list[int]] = generated[:, ids.size(1) :].tolist()
        return new

    def identity(self) -> dict[str, Any]:
        """See :class:`Reader`."""
        config = self.model.config
        return {
            "kind": "transformers", "size": f"{config.model_type}-{config.num_hidden_layers}x{config.hidden_size}",
            "config": config.to_diff_dict(), "dtype": str(self.model.dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "weights": weights_digest(self.model),
            "tokenizer": {"kind": "transformers", "name": type(self.tokenizer).__name__, "sha256": self._digest()},
        }  # fmt: skip

    def _digest(self) -> str:
        """A SHA-256 of everything that makes ids of a prompt: vocabulary, merges, what stands before it, the chat."""
        vocabulary = "\n".join(f"{token}\t{i}" for token, i in sorted(self.tokenizer.get_vocab().items()))
        inner = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = "" if inner is None else inner.to_str()
        parts = (vocabulary, rules, str(self._before), str(getattr(self.tokenizer, "chat_template", None)))
        return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """A SHA-256 of all parameters under their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pad(rows: Sequence[Sequence[int] | Ids], *, left: bool) -> Ids:
    """Rows as one array (B, N), with zeros before or behind the shorter ones."""
    ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, slice(-len(row), None) if left else slice(len(row))] = row
    return ids


def _left_pad_positions(ids: Tensor, lengths: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Positions and documents (B, N) of rows padded on the left; None for rows of one length."""
    if bool((lengths == ids.size(1)).all()):
        return None, None
    places = torch.arange(ids.size(1), device=ids.device) - (ids.size(1) - lengths)[:, None]
    return places.clamp(min=0), (places >= 0).to(torch.uint8)


def _until(ids: list[int], ends: set[int]) -> list[int]:
    return ids[: next((place for place, token in enumerate(ids) if token in ends), len(ids))]
