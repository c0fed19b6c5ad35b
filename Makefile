# Every target does its own set-up, shows progress, and can be run twice.
.DEFAULT_GOAL := help
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
.PHONY: help setup demo test unit integration check lint types contracts bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-zA-Z0-9_-]+:.*## / {printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install the locked dependencies into .venv
	@scripts/setup

demo: setup ## Watch workers die and their jobs come back, on an embedded Postgres
	@$(PY) -m reconciler demo $(DEMO_ARGS)

test: setup ## Run the unit, integration and API-tier tests
	@scripts/test

unit: setup ## Run the pure tests only: seconds, no database
	@$(PYTEST) tests/unit

integration: setup ## Run the tests on real Postgres servers
	@$(PYTEST) tests/integration -n 2

check: lint types contracts ## Lint, types, import contracts, chart

lint: setup
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

types: setup
	@.venv/bin/mypy

contracts: setup
	@.venv/bin/lint-imports

bench: setup ## Measure the reaper against the bare SQL in the same run
	@$(PY) -m bench

clean: ## Remove the virtual environment and caches
	@rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis

-include tests/cluster/cluster.mk
