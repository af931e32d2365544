# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` do all the set-up themselves, on a bare Linux machine too; a second run reuses it.
.DEFAULT_GOAL := help
.PHONY: help setup libero rl rlinf-tests demo test test-ranks lint bench bench-rl docs lock clean
SHELL := /bin/bash
BIN := .venv/bin
PYTEST_ARGS ?=

# Nothing here needs a model hub; the tests run one thread each so that figures and results do not depend on the cores.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

setup: ## create or update .venv (system packages, Python, the locked packages, embodix)
	@scripts/setup.sh

libero: setup ## install LIBERO with its assets (1.3 GB) and set it up
	@scripts/libero.sh

rl: setup ## install RLinf and Ray for `lerobot rl` (0.35 GB)
	@scripts/rl.sh

rlinf-tests: rl ## run RLinf's own CPU unit tests with embodix's patches: make rlinf-tests CHECKOUT=<RLinf at v0.3>
	@scripts/rlinf_tests.sh "$(CHECKOUT)"

demo: setup ## record data in the simulator, train upstream and embodix side by side, write the report
	$(BIN)/lerobot data metaworld
	$(BIN)/lerobot compare experiment=demo

test: setup ## run the test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadscope -m "not four_ranks" $(PYTEST_ARGS)

test-ranks: setup ## run what launches four processes: each parallel strategy against one process, about 7 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m four_ranks $(PYTEST_ARGS)

lint: setup ## style, types and import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy plugins
	$(BIN)/lint-imports

bench: setup ## run every benchmark that needs no checkpoint; results land beside the scripts
	@set -e; for script in $$(grep -l __main__ benchmarks/*.py | xargs grep -L required=True); do echo "== $$script"; $(BIN)/python "$$script"; done

bench-rl: rl ## the shape of RL-VLA3's tables: schedules of `lerobot rl` on declared times, about 40 minutes
	$(BIN)/lerobot bench rl experiment=rl_vla3_table1
	$(BIN)/lerobot bench rl experiment=rl_vla3_ablation

docs: setup ## regenerate the reference pages in docs/ from the code
	$(BIN)/python scripts/reference.py

lock: setup ## recompile requirements.lock from pyproject.toml
	scripts/lock.sh

clean: ## remove build products and run outputs, but not .venv
	rm -rf build dist outputs multirun .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find plugins tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
