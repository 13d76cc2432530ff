"""One of our models with the interface of `lm-eval`. Imported by :func:`gape.tasks.lm_eval.register` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from gape.tasks.ruler.readers import GPTReader, Ids, pad
from gape.tasks.run_tokenizer import run_tokenizer
from gape.train import load_model
from gape.utils.validation import invalid_argument, whole


@register_model("gape")
class GapeLM(TemplateLM):  # type: ignore[misc,untyped-decorator,unused-ignore]
    """A run of `gape lm train` for tasks of `lm-eval`. Nothing is ever cut off: our models read any length.

    Args:
        run: the run's directory, or a checkpoint. `pretrained` is another name for it.
        tokenizer: as :func:`gape.data.load_tokenizer` takes it; not needed for a run on bytes.
        max_length: tokens of a window where a text is scored window by window; the training length when None.
        batch_size: requests read together; "auto" is 8.
        device: "cpu", "cuda", or None and "auto" for a GPU where there is one.
        dtype: "float32", or "bfloat16" for autocast.
        max_gen_toks: tokens generated where a task does not say how many.
        chunk: tokens that go through the model at once.
        max_batch_size: accepted and not used; the harness passes it.

    Raises:
        ValueError: no run, or a value out of range.
    """

    def __init__(
        self,
        run: str | None = None,
        tokenizer: str | None = None,
        *,
        pretrained: str | None = None,
        max_length: int | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str = "float32",
        max_gen_toks: int = 256,
        chunk: int = 16384,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        directory = run or pretrained
        if directory is None:
            raise invalid_argument("run", directory, "a directory that gape lm train made")
        if dtype not in ("float32", "bfloat16"):
            raise invalid_argument("dtype", dtype, "float32 or bfloat16")
        device = ("cuda" if torch.cuda.is_available() else "cpu") if device in (None, "auto") else str(device)
        own = run_tokenizer(Path(directory), tokenizer)
        self.model = load_model(directory, device=device)
        self.reader = GPTReader(self.model, own, low=dtype == "bfloat16", chunk=int(chunk))
        self._device = self.reader.device
        self._name = str(directory)
        self.max_length = whole("max_length", int(max_length or self.model.config.context_length))
        self.max_gen_toks = whole("max_gen_toks", int(max_gen_toks))
        self.batch_size = 8 if str(batch_size).startswith("auto") else whole("batch_size", int(batch_size))

    @property
    def eot_token_id(self) -> int:
        """The end of a text; 0 where the tokenizer has none."""
        return self.reader.tokenizer.end_of_text or 0

    @property
    def tokenizer_name(self) -> str:
        """What tells cached requests of another tokenizer apart."""
        return str(self.reader.tokenizer.identity()["sha256"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text; nothing is added."""
        return self.reader.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation and whether it is the greedy one."""
        likelihoods: dict[int, tuple[float, bool]] = {}
        for batch in self._batches([len(context) + len(more) for _, context, more in requests]):
            rows = [(np.array(requests[n][1]), np.array(requests[n][2])) for n in batch]
            likelihoods |= dict(zip(batch, self._likelihoods(rows), strict=True))
            for number in batch:
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], likelihoods[number])
        return [likelihoods[number] for number in range(len(requests))]

    @torch.no_grad()
    def _likelihoods(self, rows: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
        ids = torch.from_numpy(pad([np.concatenate(row) for row in rows], left=False)[:, :-1]).to(self._device)
        cache = self.model.new_cache(ids.size(1)) if ids.size(1) > self.reader.chunk else None
        with self.reader.precision():
            parts = [self.model.hidden(part, cache=cache) for part in torch.split(ids, self.reader.chunk, dim=1)]
            x = torch.cat(parts, dim=1)
            likelihoods = []
            for row, (context, more) in enumerate(rows):
                last = slice(len(context) - 1, len(context) + len(more) - 1)
                logs = self.model.logits(x[row, last]).double().log_softmax(-1).cpu()
                targets = torch.from_numpy(more)
                greedy = bool((logs.argmax(-1) == targets).all())
                likelihoods.append((float(logs.gather(1, targets[:, None]).sum()), greedy))
        return likelihoods

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, read in windows of max_length."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
                context_len=1,
            ):  # fmt: skip
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += likelihood
        for request, likelihood in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, likelihood)
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy text up to a stop sequence.

        Raises:
            ValueError: a task asks for text that is drawn at random.
        """
        prompts = [(request.args[0], dict(request.args[1])) for request in requests]
        if any(options.get("do_sample") and options.get("temperature", 1) > 0 for _, options in prompts):
            raise ValueError("do_sample: got True, expected greedy generation; this adapter draws nothing at random")
        encoded = [np.array(self.tok_encode(text) or [self.eot_token_id]) for text, _ in prompts]
        budgets = [int(options.get("max_gen_toks") or self.max_gen_toks) for _, options in prompts]
        outputs: dict[int, str] = {}
        for batch in self._batches([len(ids) for ids in encoded]):
            completions = self.reader.complete([encoded[n] for n in batch], max(budgets[n] for n in batch))
            for number, ids in zip(batch, completions, strict=True):
                text = self.reader.decode(ids[: budgets[number]])
                outputs[number] = _until(text, prompts[number][1].get("until"))
                self.cache_hook.add_partial("generate_until", requests[number].args, outputs[number])
        return [outputs[number] for number in range(len(requests))]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of requests, long ones first."""
        ordered = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
        for start in range(0, len(ordered), self.batch_size):
            yield ordered[start : start + self.batch_size]


def _until(text: str, stops: str | Sequence[str] | None) -> str:
    """A text up to the first of some stop sequences."""
    for stop in [stops] if isinstance(stops, str) else stops or []:
        text = text.partition(stop)[0] if stop else text
    return text
