"""Examples of the guide on models of transformers, under both of its majors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.families
# peft calls a method of transformers by its old name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ["forgetting", "hf"])
def test_examples_in_the_docs_run(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs/guide" / f"{name}.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, f"docs/guide/{name}.md", "exec"), names)
    assert names["cache"].get_seq_length() > 20
