"""What is measured: a module per question, rows in `benchmarks/data/*.csv`; see `docs/benchmarks.md`."""
