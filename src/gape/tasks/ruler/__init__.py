"""RULER: long-context tasks for models of any size. `docs/guide/ruler.md` has the tasks, formats and rules."""
