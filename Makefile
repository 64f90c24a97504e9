# make          the same as make test
# make run      three spoken questions and their answers, what caches save, what to try next
# make test     lint and types beside the tests; .ci/run calls this one
# make docs     the documentation's site, in site/; make test builds it too, to check its links
# make test-clients  third-party clients against omni serve, in environments of their own
# make interpret  kernels for GPUs, without one: every case run as Python, and compiled, for 20 minutes
# make bench    the benchmarks of benchmarks/, printed
# make gpu      what can only be learnt on a GPU, in nine minutes: outputs/gpu/report.md
# make train-spoken-sums  train the checkpoint of spoken_sums: hours, and Debian's espeak-ng and flite
# make torture  the scripts of torture/: faults and hostile inputs, for hours
#
# The first target that needs it builds .venv, make run with what the demo needs, the others with the
# rest as well. Its Python is the first of python3.13, python3.12 and python3.11 that works, or the
# one that is named: make PYTHON=/path/to/python3.11 test.
# Outside this folder only $OMNI_CACHE_DIR, by default ~/.cache/omni-pipeline, is written: seeded
# models and compiled kernels. On Linux PyPI's torch brings CUDA along; for the small CPU build:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?=
VENV := .venv
CLIENTS := .venv-clients
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
# Read from the constraints, so that the version stands in one place.
TORCH := $(shell sed -n 's/^torch==/torch==/p' $(CONSTRAINTS))
# What omni needs, and what tests, linters and the documentation need beside it.
OMNI := $(VENV)/.omni
STAMP := $(VENV)/.installed
# Modules are compiled when they are first imported: most never are, and it would take half the time.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile
# Strict: a link that leads nowhere is an error. (With --quiet it would not be.)
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Else each of a run's many processes compiles all of this project's files again, for half a second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := test
.PHONY: install run test test-clients lint pytest docs interpret bench gpu torture train-spoken-sums clean which-python

install: $(STAMP)

# torch goes first and alone: the constraint then keeps every later package from replacing it.
$(OMNI): pyproject.toml $(CONSTRAINTS)
	@echo "1/3 $(VENV): an environment of its own"
	@test -x $(BIN)/python || { python=$$(.ci/python "$(PYTHON)") && "$$python" -m venv $(VENV); }
	@echo "2/3 $(TORCH), the largest part (some 200 MB): minutes"
	@$(PIP) $(TORCH) || { \
		echo "$(TORCH) cannot be installed for $$($(BIN)/python --version)." \
			"To try another Python: make clean, then make PYTHON=/path/to/python" >&2; \
		exit 1; }
	@echo "3/3 omni-pipeline and what it needs (some 100 MB)"
	@$(PIP) --constraint $(CONSTRAINTS) --editable .
	@touch $@

$(STAMP): $(OMNI)
	@echo "and what tests, linters and the documentation need (some 180 MB)"
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

which-python:
	@.ci/python "$(PYTHON)"

run: $(OMNI)
	@$(BIN)/omni demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MKDOCS) --site-dir $(VENV)/site

docs: $(STAMP)
	$(MKDOCS)

# One more than there are cores: they wait for other processes, too. Each takes about 1.5 GB. Another
# number: make WORKERS=2 test
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(os.cpu_count() or 1, 4) + 1)')

# What tests build stays for the next run.
pytest: $(STAMP)
	@OMNI_TEST_CACHE=$(VENV)/tested $(BIN)/python -m pytest -q --numprocesses=$(WORKERS) --dist=worksteal

# Lint runs beside the tests and is heard only if it fails, so that pytest's closing line is the
# last thing printed.
test: $(STAMP)
	@echo "ruff and mypy run beside the tests and are heard if they fail"; \
	{ $(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 || \
		{ echo; cat $(VENV)/lint.log; exit 1; }; } & lint=$$!; \
	$(MAKE) --no-print-directory pytest; tests=$$?; \
	wait $$lint && exit $$tests

# Three environments: frameworks for voice and load generators want other versions of what they share
# with the rest.
$(CLIENTS)/.installed: clients/requirements.txt
$(CLIENTS)-voice/.installed: clients/voice/requirements.txt
$(CLIENTS)-load/.installed: clients/load/requirements.txt
$(CLIENTS)/.installed $(CLIENTS)-voice/.installed $(CLIENTS)-load/.installed:
	@test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --requirement $<
	@touch $@

# With --table the results go into docs/serving.md.
test-clients: $(STAMP) $(CLIENTS)/.installed $(CLIENTS)-voice/.installed $(CLIENTS)-load/.installed
	$(CLIENTS)/bin/python -m pytest -c clients/pytest.ini --table clients/*.py
	$(CLIENTS)-voice/bin/python -m pytest -c clients/pytest.ini --table clients/voice
	$(CLIENTS)-load/bin/python -m pytest -c clients/pytest.ini --table clients/load

interpret: $(STAMP)
	$(BIN)/python -m pytest -q --numprocesses=$(WORKERS) tests/engine/attention/every_triton_case.py
	$(BIN)/python -m tests.support.compiled_kernels 90
	$(BIN)/python -m tests.support.compiled_kernels 80

bench: $(STAMP)
	$(BIN)/python benchmarks/stage_output_cache.py
	$(BIN)/python benchmarks/engine_cpu.py
	$(BIN)/python benchmarks/hybrid_memory.py
	$(BIN)/python benchmarks/scheduling.py
	$(BIN)/python benchmarks/tensor_hop.py
	$(BIN)/python benchmarks/runtime.py
	$(BIN)/python -m benchmarks.chaos
	$(BIN)/python -m benchmarks.encoder_decoder_cpu

gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu --out outputs/gpu

torture: $(STAMP)
	$(BIN)/python -m torture

train-spoken-sums: $(STAMP)
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[training]'
	$(BIN)/python -m training.spoken_sums

clean:
	rm -rf $(VENV) $(CLIENTS) $(CLIENTS)-voice $(CLIENTS)-load site .mypy_cache .pytest_cache .ruff_cache .hypothesis
