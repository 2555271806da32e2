# For a newcomer: `make demo`, then `make test`. `make` alone lists everything.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test slow serving lint types format clean

VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= demo

# The first Python on the path that the package supports; PYTHON=/path/to/python3.12 chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$p && break; done)

# Without an NVIDIA GPU, torch comes from its index of CPU builds, a tenth of the size. That index is
# used for torch alone; if it cannot be reached, the default index is used (with CUDA).
# TORCH_INDEX_URL= (empty) uses the default index only.
TORCH_INDEX_URL ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
TORCH_INDEX := $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL) --retries 0 --timeout 15)

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/  make \1|\2/' \
		| column -t -s '|'

# Of pip only errors are shown.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --root-user-action=ignore

install: $(VENV)/installed ## a virtual environment in .venv with the pinned dependencies

# Torch first, because the others depend on it, in whatever build is installed. DeepSpeed compiles
# nothing now (DS_BUILD_OPS=0); its kernels are built on a GPU when they are first used.
$(VENV)/installed: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11, 3.12 or 3.13 must be on the path, or named: make PYTHON=/path/to/python3.12"; \
		exit 1; \
	fi
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch$(if $(TORCH_INDEX_URL), (CPU build from $(TORCH_INDEX_URL), if it answers))"
	@$(PIP) --no-deps $(TORCH_INDEX) -c constraints.txt torch 2> $(VENV)/pip.log \
		|| $(PIP) --no-deps -c constraints.txt torch || { cat $(VENV)/pip.log >&2; exit 1; }
	@echo "Installing the rest; this takes a few minutes, once"
	@DS_BUILD_OPS=0 $(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

demo: install ## train a drafter for the embedded target, then measure it (RUN=another for a second one)
	@if [ -d outputs/$(RUN)/checkpoints ]; then \
		echo "outputs/$(RUN) exists already: training resumes where it stopped (make demo RUN=another starts a new run)"; \
		set -x; $(BIN)/python -m drafttrain train +experiment=demo run.name=$(RUN) run.resume=true; \
	else \
		set -x; $(BIN)/python -m drafttrain train +experiment=demo run.name=$(RUN); \
	fi
	$(BIN)/python -m drafttrain evaluate run.dir=outputs/$(RUN) model.inflate=200M eval=large 'eval.depths=[]' eval.policy=chain
	$(BIN)/python -m drafttrain evaluate run.dir=outputs/$(RUN) eval.policy=chain
	@$(BIN)/python scripts/show_demo.py outputs/$(RUN)

# worksteal: an idle worker takes tests from the other, and neighbours, which share fixtures, mostly stay together.
# CHECK_SHAPES=1, as in CI, also checks shapes and types of every call, which takes half as long again.
test: install ## the default tests: CPU, offline
	$(BIN)/python -m pytest -n auto --dist worksteal

slow: install ## the slow tests
	$(BIN)/python -m pytest -m slow -n auto --dist worksteal --durations=20

serving: install ## export to a real vLLM, OpenVINO and llama.cpp, and compare (installs and builds them)
	PYTHON=$(BIN)/python scripts/serving_suite.sh

lint: install ## ruff: mistakes and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## mypy
	$(BIN)/mypy

format: install ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and builds; runs in outputs/ and the virtual environment stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
