"""RULER: long-context tasks for models of any size. `docs/guide/ruler.md` has the tasks, formats and rules."""

from gape.tasks.ruler.generator import Generator
from gape.tasks.ruler.ingredients import Ingredients
from gape.tasks.ruler.tasks import score

__all__ = ["Generator", "Ingredients", "score"]
