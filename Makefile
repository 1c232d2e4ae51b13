# Every target sets up .venv itself. `make run` trains a policy; `make test` proves that it would.
.DEFAULT_GOAL := run
.PHONY: run test test-all check bench soak ui serve setup plan

PYTHON ?= python3
unexport PYTHONDONTWRITEBYTECODE  # every command would compile the project's modules again
BIN := .venv/bin
STAMP := .venv/.set-up

run: setup
	$(BIN)/nightshift run

plan: setup
	$(BIN)/nightshift plan

ui: setup
	$(BIN)/nightshift ui

serve: setup
	$(BIN)/nightshift serve

# Tests share what is slow to start, so a process gets whole files, and those of tests/conftest.py together and first.
# Two processes more than cores: a quarter of the time a test waits for servers and workers that it has started.
PROCESSES := $(shell expr `getconf _NPROCESSORS_ONLN` + 2)
PYTEST := $(BIN)/python -m pytest -q -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) -m "not slow"

test-all: setup
	$(PYTEST) --hypothesis-profile random

check: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

bench: setup
	for script in benchmarks/*.py; do $(BIN)/python "$$script" || exit 1; done

# Nights that are disturbed on purpose (docs/reliability.md): make soak MINUTES=60 SEED=0
MINUTES ?= 60
SEED ?= 0
soak: setup
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

# Prefect makes its home folder one level deep only, and it lies in .state.
setup: $(STAMP) versions.yaml
	@mkdir -p .state

# Part of DVC's cache key; nightshift keeps it up to date, but a `dvc repro` by hand may come first.
versions.yaml: $(STAMP)
	$(BIN)/nightshift versions
	touch versions.yaml

# hf-libero and robosuite declare far more than their simulation uses, so they are installed without it.
$(STAMP): pyproject.toml constraints.txt requirements-simulator.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --disable-pip-version-check -q --no-deps -r requirements-simulator.txt
	touch $(STAMP)
