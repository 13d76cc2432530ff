# `make demo` and `make test` are all a new user needs; each builds .venv itself.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The other major of transformers that is supported, laid over the environment by PYTHONPATH.
OTHER := $(VENV)/transformers4

# bfloat16 matrix products of oneDNN die with SIGILL on some virtual CPUs unless the instruction set is capped.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

# Test files are spread over processes of one thread each; WORKERS=0 runs them in one.
WORKERS ?= auto
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

.PHONY: help demo precision test test-all test-majors docs lint format clean

help:
	@echo "make demo      train small models with and without gates, and see who finds the needle at four times the length"
	@echo "make precision what each implementation loses in bfloat16 and float16"
	@echo "make test      the tests of two to five minutes on two cores"
	@echo "make test-all  the same and the slow ones, and gape.hf with both majors of transformers"
	@echo "make docs      build the documentation site; check its links, commands and examples"
	@echo "make lint      ruff, mypy and the import contracts"
	@echo "make format    let ruff rewrite the files"

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/gape demo

precision: $(INSTALLED)
	$(BIN)/python benchmarks/precision.py --quick

test: $(INSTALLED)
	$(PYTEST) -m "not slow and not gpu"

test-all: $(INSTALLED)
	$(PYTEST) -m "not gpu"
	$(MAKE) test-majors

$(OTHER)/.installed: $(INSTALLED)
	$(BIN)/pip install --quiet --upgrade --target $(OTHER) 'transformers>=4.57,<5' httpx
	touch $@

test-majors: $(OTHER)/.installed
	PYTHONPATH=$(OTHER) $(PYTEST) -m "not gpu and (not slow or families)" tests/hf tests/cli/test_hf.py

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs
	$(PYTEST) tests/test_docs.py tests/hf/test_docs.py
	$(BIN)/python docs/site/build.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
