# `make demo` and `make test` are all a new user needs; each builds .venv itself.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# bfloat16 matrix products of oneDNN die with SIGILL on some virtual CPUs unless the instruction set is capped.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

.PHONY: help demo precision test test-all lint format clean

help:
	@echo "make demo      train small models with and without gates, and see who finds the needle at four times the length"
	@echo "make precision what each implementation loses in bfloat16 and float16"
	@echo "make test      the tests that fit in five minutes on two cores"
	@echo "make test-all  the same and the slow ones"
	@echo "make lint      ruff and mypy"
	@echo "make format    let ruff rewrite the files"

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/gape demo

precision: $(INSTALLED)
	$(BIN)/gape bench precision --quick

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
