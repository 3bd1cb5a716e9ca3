# Every target that runs something builds its own .venv first, and costs nothing once that stands.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Touched when everything is installed; an installation that broke off is tried again.
READY := $(VENV)/.ready
# The same for what `make docs` needs besides.
DOCS_READY := $(VENV)/.docs-ready

DEMO_DIR := runs/demo
DEMO_ARGS := resnet18 --data digits --run-dir $(DEMO_DIR)
PYTEST_ARGS ?=
# Test files at a time: most tests wait for processes of their own, so one at a time leaves cores idle.
TEST_JOBS ?= 2
DATA_ROOT ?= data
SYNC_ARGS ?=
PLANNER_ARGS ?=
THESIS_ARGS ?=
PACK ?=
BENCHMARKS := $(wildcard benchmarks/*/main.py)

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench bench-planner bench-sync bench-thesis gpu-check docs images clean partition-sweep hang-hunt fuzz

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do \
		printf '%-18s %s\n' "$$target" "$$text"; done

venv: $(READY) ## Build .venv with the versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hybridpar needs Python 3.11 or newer, and '$(PYTHON)' is not; name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "building $(VENV); the first time this downloads torch, which takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[test]' --constraint constraints.txt
	@touch $@

demo: $(READY) ## Train ResNet-18 on real images; minutes on a laptop, no download
	@rm -rf $(DEMO_DIR)
	$(BIN)/hybridpar train $(DEMO_ARGS)
	@$(BIN)/python scripts/beside_ddp.py $(DEMO_DIR)

test: $(READY) ## Run the tests; PYTEST_ARGS="-k sync" chooses
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(READY) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## Repeat the committed benchmarks; as root, for links of a given rate
	@test -n "$(BENCHMARKS)" || echo "no benchmark has been committed yet"
	@set -e; for file in $(BENCHMARKS); do \
		module=$$(echo "$${file%.py}" | tr / .); echo "== $$module"; $(BIN)/python -m "$$module"; done

bench-sync: $(READY) ## Compressed gradients against their peers, as root; SYNC_ARGS="--peers DIR"
	$(BIN)/python -m benchmarks.sync.main $(SYNC_ARGS)

bench-planner: $(READY) ## The planner's predictions and choices against clocks, as root; PLANNER_ARGS="--table ways"
	$(BIN)/python -m benchmarks.planner.main $(PLANNER_ARGS)

bench-thesis: $(READY) ## ResNets on CIFAR and Caltech-101 against all peers; DATA_ROOT=DIR, GPUs, hours
	$(BIN)/python -m benchmarks.thesis --data-root '$(DATA_ROOT)' $(THESIS_ARGS)

gpu-check: $(READY) ## Test and time on this machine's GPU; PACK=steps chooses: checks, steps, kernels, thesis, codecs
	$(BIN)/python scripts/gpu_check.py $(PACK)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[docs]' --constraint constraints.txt
	@touch $@

docs: $(DOCS_READY) ## Build the site of docs/ in build/site; fails on a warning
	$(BIN)/python -m mkdocs build --strict

images: $(READY) ## Make docs/images again: the demo from a run, figures from committed rows
	$(BIN)/python docs/make_images.py "make demo" $(MAKE) --silent --no-print-directory demo
	$(BIN)/python docs/draw_figures.py

clean: ## Remove what was built; runs/ and data/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './runs/*' -not -path './data/*' -prune -exec rm -rf {} +

partition-sweep: $(READY) ## Check random cuts of 29 models against the whole; an hour
	$(BIN)/python -m benchmarks.partition.sweep
	$(BIN)/python -m pytest -m sweep

HANG_ARGS ?=

hang-hunt: $(READY) ## 500 steps of every codec with random buckets, lanes and delays, 2 and 3 workers; HANG_ARGS="--seed 7"
	$(BIN)/python -m tests.compress.hang_hunt $(HANG_ARGS)

FUZZ_ARGS ?=

fuzz: $(READY) ## Read 100,000 damaged files of every kind; FUZZ_ARGS="--kind plan.json --seed 7"
	$(BIN)/python -m tests.damage $(FUZZ_ARGS)
