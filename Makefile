# bapo on one machine. `make` alone lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install run test test-slow lint compare bench docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --progress-bar off -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --progress-bar off -c constraints.txt -e ".[local,dev]"
	touch $@

install: $(STAMP) ## create .venv and install from pinned constraints

run: $(STAMP) ## train with BAPO on Countdown, show a report
	$(BIN)/bapo run examples/countdown.yaml --new

test: $(STAMP) ## pass the tests
	$(BIN)/pytest

test-slow: $(STAMP) ## the longer proofs
	$(BIN)/pytest -m slow --timeout 1800

lint: $(STAMP) ## style, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

compare: $(STAMP) ## BAPO, GRPO and DAPO, 3 seeds each (an hour; QUICK=1: ten minutes)
	$(BIN)/bapo compare examples/countdown.yaml $(if $(QUICK),steps=25 evaluation.every=10)

bench: $(STAMP) ## the benchmarks of benchmarks/
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.stack
	$(BIN)/python -m benchmarks.verifier
	$(BIN)/python -m benchmarks.buffer

docs: $(STAMP) ## regenerate docs/configuration.md
	$(BIN)/python -m services.local.config_docs docs/configuration.md

clean: ## remove the environment, the local stack's data and the runs
	rm -rf $(VENV) .bapo runs
