# Two commands matter: `make run` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup run test check lint types imports tests soak pocket-model pocket-report clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the environment (.venv) and nothing else

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Atelier needs Python 3.11 or later (set PYTHON=/path/to/python3)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing (a few minutes the first time) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 2> >(grep -v '^WARNING: Location' >&2)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' 2> >(grep -v '^WARNING: Location' >&2)
	@touch $@

run: setup ## start everything, make a first image, print keys and curl lines (Ctrl-C stops)
	@exec $(BIN)/atelier up $(ARGS)

test: check tests ## the whole check: ruff, pyright, import-linter, pytest

check: lint types imports

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@$(BIN)/pyright --warnings

imports: setup
	@$(BIN)/lint-imports

tests: setup
	@$(BIN)/python -m pytest $(ARGS)

soak: setup ## the long runs: chaos, fuzz, mutants, big simulations
	@$(BIN)/python -m pytest -m soak --timeout 7200 $(ARGS)

pocket-model: setup ## train the bundled model from its recipe, going on from checkpoints (hours on a CPU)
	@$(BIN)/python -m models.pocket.recipe $(ARGS)

pocket-report: setup ## measure the bundled model, by the checker that is not the model
	@$(BIN)/python -m models.pocket.recipe.report $(ARGS)

clean: ## remove the environment and caches; data under var/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
