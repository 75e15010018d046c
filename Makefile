# The commands of a checkout. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RECIPE = $(if $(filter 1 yes true,$(QUICK)),demo-quick,demo)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help
help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

.PHONY: install
install: $(STAMP) ## make .venv with the exact versions of constraints.txt; does nothing when it is up to date

# The stamp is written last, so that an installation that was cut short is done again.
$(STAMP): pyproject.toml constraints.txt | system-deps
	@echo "installing into $(VENV) (torch is the largest part; README says which build pip picks)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-input -c constraints.txt -e '.[train,dev]'
	@touch $@

.PHONY: system-deps
system-deps: ## install the Debian packages that are missing (needs root; otherwise names them)
	@PYTHON=$(PYTHON) bash scripts/system-deps.sh

.PHONY: demo
demo: $(STAMP) ## train the demo agent from tasks to report; QUICK=1 for a short look
	$(BIN)/cadenza train $(RECIPE)

.PHONY: proof
proof: $(STAMP) ## measure the claims that are not recorded yet (hours; resumable by claim, arm and seed)
	$(BIN)/python experiments/first_loop.py
	$(BIN)/python experiments/length_price.py
	$(BIN)/python experiments/whole_loop.py

.PHONY: test
test: $(STAMP) test-deps lint docs ## everything a change must pass
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

.PHONY: test-deps
test-deps: ## as system-deps, with what only the tests need (Chromium)
	@PYTHON=$(PYTHON) bash scripts/system-deps.sh test

.PHONY: lint
lint: $(STAMP) ## ruff, import-linter, pyright, generated files up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright
	$(BIN)/python scripts/figures.py --check
	$(BIN)/python scripts/configuration_page.py --check

.PHONY: format
format: $(STAMP) ## let ruff format and mend what it can, and regenerate generated files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python scripts/figures.py
	$(BIN)/python scripts/configuration_page.py

.PHONY: docs
docs: $(STAMP) ## build the documentation into docs/_build, warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going -n -b html docs docs/_build/html

.PHONY: build
build: $(STAMP) ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build

.PHONY: clean
clean: ## remove what can be made again, but neither .venv nor runs
	rm -rf build dist docs/_build .ruff_cache .pytest_cache .hypothesis .import_linter_cache
