# Everything runs in virtual environments of this directory; all that is needed
# beforehand is make and Python 3.11 or newer. Run `make` for the list.

PYTHON ?= python3
VENV ?= .venv
# The Django of the environment: 52, 60 or 61 (see requirements/).
DJANGO ?= 52
# Extra arguments for pytest: make test ARGS="-k claims -x"
ARGS ?=
# Which PostgreSQL, where DATABASE_URL names none: POSTGRES="--bindir /path/to/bin"
POSTGRES ?=

BIN := $(VENV)/bin
# Test processes for each database: most of the long tests wait for processes and leases.
TEST_PROCESSES ?= 2

PYTEST := $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal $(ARGS)
PIP_INSTALL := -m pip install -qq -c requirements/constraints.txt
CHECK_PYTHON := import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")

export PYTHONDEVMODE ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv test test-sqlite test-postgres long mutations coverage lint format types imports \
	migrations docs demo serve soak bench dist clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

venv: $(VENV)/.stamp ## Create or refresh the development environment

# The build tools come first, at their pinned versions, so that the project
# itself can be built without an isolated (and unpinned) build environment.
$(VENV)/.stamp: pyproject.toml requirements/constraints.txt requirements/django$(DJANGO).txt
	@echo "Installing into $(VENV)"
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@PYTHONDEVMODE= $(PYTHON) -m venv --clear $(VENV)
	@PYTHONDEVMODE= $(BIN)/python $(PIP_INSTALL) pip
	@PYTHONDEVMODE= $(BIN)/python $(PIP_INSTALL) -r requirements/django$(DJANGO).txt --group dev
	@PYTHONDEVMODE= $(BIN)/python $(PIP_INSTALL) --no-build-isolation -e .
	@touch $@

# Two commands at the same time; what the second one wrote comes after the first.
at_once = log=$$(mktemp); status=0; \
	$(2) >$$log 2>&1 & other=$$!; \
	$(1) || status=$$?; \
	! kill -0 $$other 2>/dev/null || echo "(the other one still runs; its output follows)"; \
	wait $$other || status=$$?; \
	cat $$log; rm -f $$log; exit $$status

# The tests of processes and leases spend most of their time waiting.
test: $(VENV)/.stamp ## Run the suite on SQLite and on PostgreSQL
	@$(call at_once,$(MAKE) --no-print-directory test-sqlite,$(MAKE) --no-print-directory test-postgres)

test-sqlite: $(VENV)/.stamp ## Run the suite on SQLite
	@echo "== The suite on SQLite"
	@TEST_DATABASE=sqlite $(PYTEST)

test-postgres: $(VENV)/.stamp ## Run the suite on PostgreSQL
	@echo "== The suite on PostgreSQL"
	@$(BIN)/python -m tests._postgres $(POSTGRES) -- $(PYTEST)

# The last -m is the one that counts.
long: $(VENV)/.stamp ## Run the tests that take long real time on both databases
	@$(MAKE) --no-print-directory test ARGS="$(ARGS) -m long"

mutations: $(VENV)/.stamp ## Take out each condition of the fence: a test must notice
	@$(call at_once,TEST_DATABASE=sqlite $(BIN)/python -m tests.mutations,\
		$(BIN)/python -m tests._postgres -- $(BIN)/python -m tests.mutations)

# Ten minutes; SOAK="--seconds 60 --seed 7" for another time or the same choices again.
SOAK ?=

soak: $(VENV)/.stamp ## Besiege workers on PostgreSQL for ten minutes and judge what they leave
	@$(BIN)/python -m tests.soak $(SOAK)

coverage: $(VENV)/.stamp ## Run the suite on both databases and report the coverage
	@$(BIN)/coverage erase
	@$(MAKE) --no-print-directory test PYTEST="$(BIN)/coverage run -m pytest -q -n $(TEST_PROCESSES) --dist worksteal $(ARGS)"
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

lint: $(VENV)/.stamp ## Check style with ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.stamp ## Fix style with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.stamp ## Check types with mypy
	@PYTHONDEVMODE= $(BIN)/python -m mypy

imports: $(VENV)/.stamp ## Check the layers with import-linter
	@PYTHONDEVMODE= $(BIN)/lint-imports --no-logo

migrations: $(VENV)/.stamp ## Check that the models need no new migration
	@TEST_DATABASE=sqlite $(BIN)/python -m django makemigrations --check --dry-run \
		--settings=tests.settings django_durable_jobs

docs: $(VENV)/.stamp ## Build the documentation; a warning is an error
	@PYTHONDEVMODE= $(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

demo: $(VENV)/.stamp ## Run the example's demonstration
	@$(BIN)/python example_project/demo.py

serve: $(VENV)/.stamp ## Serve the example project
	@PYTHONDEVMODE= $(BIN)/python example_project/serve.py

bench: .venv-bench/.stamp ## Run the benchmarks in an environment of their own
	@PYTHONDEVMODE= .venv-bench/bin/python benchmarks/run.py $(ARGS)

.venv-bench/.stamp: pyproject.toml requirements/constraints.txt requirements/django52.txt
	@echo "Installing into .venv-bench"
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@PYTHONDEVMODE= $(PYTHON) -m venv --clear .venv-bench
	@PYTHONDEVMODE= .venv-bench/bin/python $(PIP_INSTALL) pip
	@PYTHONDEVMODE= .venv-bench/bin/python $(PIP_INSTALL) -r requirements/django52.txt --group bench
	@PYTHONDEVMODE= .venv-bench/bin/python $(PIP_INSTALL) --no-build-isolation -e .
	@touch $@

dist: $(VENV)/.stamp ## Build the wheel and the source archive
	@rm -rf dist
	@PYTHONDEVMODE= $(BIN)/python -m build --no-isolation -q
	@ls dist/*

clean: ## Remove environments, builds and caches
	rm -rf .venv .venv-bench .venvs build dist docs/_build htmlcov .coverage .coverage.* \
		.hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
