"""RULER's own wording, through the task definitions of an installed `lm-eval`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from gape.tasks.ruler.tasks import task
from gape.utils.validation import invalid_argument

#: Generators of that package are made for this length and more; below it some never end.
SHORTEST = 4096
_NAMES = {"vt": "ruler_vt", "cwe": "ruler_cwe", "fwe": "ruler_fwe", "qa_1": "ruler_qa_squad", "qa_2": "ruler_qa_hotpot"}
WORDING = "lm-eval"


def samples(name: str, length: int, tokenizer: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of a task as `lm-eval` makes them, in our fields. It makes 500 of them and may want the network.

    Args:
        name: one of RULER's tasks.
        length: at least 4,096.
        tokenizer: a folder or a name that `transformers` can load.
        count: at most 500.
        seed: of the random numbers that package draws.

    Raises:
        ValueError: a length below 4,096, or what that package needs cannot be had.
        ImportError: it is missing; says how to install it.
    """
    own = task(name)
    if length < SHORTEST:
        raise invalid_argument(
            "length", length, f"at least {SHORTEST} for the wording of lm-eval; our own has shorter ones"
        )
    try:
        from lm_eval.tasks import TaskManager  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("RULER's own wording needs lm-eval: pip install 'gape[eval]'") from error
    called = _NAMES.get(own.name, own.name)
    # It draws from the generators of the whole process.
    before, beside = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        manager = TaskManager(metadata={"tokenizer": tokenizer, "max_seq_lengths": [length]})
        found = manager.load([called])["tasks"][called].dataset["test"]
    # Data that it fetches, resources of nltk, a tokenizer: whatever is missing.
    except Exception as error:
        raise ValueError(f"{own.name}: lm-eval cannot make it: {type(error).__name__}: {error}") from error
    finally:
        random.setstate(before)
        np.random.set_state(beside)  # noqa: NPY002
    rows = [dict(row) for row in found.select(range(min(count, len(found))))]
    return [
        {
            "task": own.name, "index": number, "input": row["input"], "answer_prefix": f" {row['gen_prefix']}",
            "outputs": list(row["outputs"]), "length": row["length"], "max_seq_length": length, "budget": own.budget,
            "wording": WORDING,
        }
        for number, row in enumerate(rows)
    ]  # fmt: skip
