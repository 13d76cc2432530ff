"""Two tasks of lm-eval from a local file of questions, by its own command line, for models with gates and without.

    pip install 'gape[eval]' pyyaml
    python examples/lm_eval_squad.py squad-dev.json models/smollm2 models/smollm2-gape --questions 20

The file is SQuAD's, JSON or JSON in .xz. squad_choice asks which of four answers from one article is right (accuracy by
log-likelihood); squad_answer gives the perplexity of right answers and how often each is the greedy one. Nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{context}}\nQuestion: {{question}}\nAnswer:",
}
TASKS: dict[str, dict[str, Any]] = {
    "squad_choice": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "squad_answer": {
        "output_type": "loglikelihood", "doc_to_target": " {{answer}}", "target_delimiter": "",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
}  # fmt: skip


def questions(file: Path, count: int) -> list[dict[str, Any]]:
    """Questions on the shortest paragraphs, each with three wrong answers from the same article."""
    data = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
    rows: list[dict[str, Any]] = []
    for article in json.loads(data)["data"]:
        asked = [(part["context"], q) for part in article["paragraphs"] for q in part["qas"]]
        answers = list(dict.fromkeys(q["answers"][0]["text"] for _, q in asked))
        for context, q in sorted(asked, key=lambda pair: len(pair[0]))[:1]:
            answer = q["answers"][0]["text"]
            choices = sorted([answer, *[other for other in answers if other != answer][:3]])
            row = {"context": context, "question": q["question"], "answer": answer}
            rows.append(row | {"choices": choices, "label": choices.index(answer)})
    return sorted(rows, key=lambda row: len(row["context"]))[:count]


def write_tasks(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The questions, and a file for each task that names them."""
    (folder / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    files = {"test": str(folder / "test.jsonl")}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump({"task": name, **COMMON, "dataset_kwargs": {"data_files": files}, **task})
        )


def scores(model: str, folder: Path) -> dict[str, float]:
    """What lm-eval's command says of a model."""
    out = folder / Path(model).name
    command = [
        "lm_eval", "--model", "hf", "--model_args", f"pretrained={model},trust_remote_code=True,dtype=float32",
        "--tasks", ",".join(TASKS), "--include_path", str(folder), "--device", "cpu", "--output_path", str(out),
        "--log_samples",
    ]  # fmt: skip
    print("$", *command, flush=True)
    subprocess.run(command, check=True)
    (found,) = out.rglob("results*.json")
    results = json.loads(found.read_text())["results"]
    return {
        f"{task} {metric.partition(',')[0]}": value
        for task in TASKS
        for metric, value in results[task].items()
        if metric.startswith(("acc,", "perplexity,"))
    }


def main() -> None:
    """Read the command line and do what the title says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions_file", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--questions", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), questions(arguments.questions_file, arguments.questions))
        for model in arguments.models:
            print(model, scores(model, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
