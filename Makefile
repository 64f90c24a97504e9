# make          the same as make test
# make run      a two-stage pipeline on prompts with shared prefixes, with its time saved
# make test     lint, types and tests: what .ci/run calls
# make bench    the benchmarks of benchmarks/, printed
#
# The first target that needs it builds .venv. Outside this folder only $OMNI_CACHE_DIR, by default
# ~/.cache/omni-pipeline, is written: seeded models and compiled kernels. On Linux PyPI's torch
# brings CUDA along; for the small CPU build:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
# Read from the constraints, so that the version stands in one place.
TORCH := $(shell sed -n 's/^torch==/torch==/p' $(CONSTRAINTS))
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := test
.PHONY: install run test lint pytest bench clean

install: $(STAMP)

# torch goes first and alone: the constraint then keeps every later package from replacing it.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

run: $(STAMP)
	$(BIN)/omni demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: $(STAMP)
	$(BIN)/python -m pytest -q

# One after the other, so that pytest's closing line is the last thing printed.
test: $(STAMP)
	$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory pytest

bench: $(STAMP)
	$(BIN)/python benchmarks/stage_output_cache.py
	$(BIN)/python benchmarks/engine_cpu.py
	$(BIN)/python benchmarks/hybrid_memory.py
	$(BIN)/python -m benchmarks.encoder_decoder_cpu

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
