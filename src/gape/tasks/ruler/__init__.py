"""RULER: long-context tasks for models of any size. `docs/guide/ruler.md` has the tasks, formats and rules."""

from gape.tasks.ruler.evaluation import Settings, evaluate, prepare, summarise
from gape.tasks.ruler.generator import Generator
from gape.tasks.ruler.ingredients import Ingredients
from gape.tasks.ruler.readers import GPTReader, TransformersReader
from gape.tasks.ruler.sources import Sample, read
from gape.tasks.ruler.tasks import TASKS, Task, score

__all__ = [
    "TASKS",
    "GPTReader",
    "Generator",
    "Ingredients",
    "Sample",
    "Settings",
    "Task",
    "TransformersReader",
    "evaluate",
    "prepare",
    "read",
    "score",
    "summarise",
]
