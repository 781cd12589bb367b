# What a user or contributor types. A target makes .venv when it is missing, and installs again
# only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
comma := ,

.DEFAULT_GOAL := help
.PHONY: help quickstart demo bench train-baselines test test-full test-gpu test-browser check fix clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' Makefile
	@echo
	@echo 'ARGS="..." is passed on:             make test ARGS="-k accept -x"'
	@echo 'PYTHON=... makes .venv from another:  make clean test PYTHON=python3.12'

quickstart: $(VENV)/.stamp-zoo ## plain and speculative generation side by side
	$(BIN)/dspark compare $(ARGS)

demo: $(VENV)/.stamp-demo ## the same side by side in a browser
	$(BIN)/dspark demo $(ARGS)

# Answers of the target, as `dspark train data` makes them.
DATA ?= answers
train-baselines: $(VENV)/.stamp-train ## the drafters that are compared, on DATA=folder of answers
	$(BIN)/python scripts/train_baselines.py --data $(DATA) $(ARGS)

bench: $(VENV)/.stamp-test ## writes every table and figure to docs/evidence; about an hour
	$(BIN)/python scripts/evidence.py $(ARGS)

test: $(VENV)/.stamp-test ## the tests, without the ones that take minutes or a GPU
	$(BIN)/pytest -m "not full and not gpu" $(ARGS)

test-full: $(VENV)/.stamp-test ## all tests that need no GPU
	$(BIN)/pytest -m "not gpu" $(ARGS)

test-gpu: $(VENV)/.stamp-test ## the tests that need a GPU
	$(BIN)/pytest -m gpu $(ARGS)

test-browser: $(VENV)/.stamp-browser ## the demo's page, in a chromium of the system
	$(BIN)/pytest tests/browser tests/unit/demo $(ARGS)

check: $(VENV)/.stamp-test ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.stamp-test ## repair what the linter and the formatter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An existing .venv with a working pip is used as it is; a broken or half-made one is made anew.
$(VENV)/.stamp-venv:
	@if ls $(VENV)/lib/python*/site-packages/pip-*.dist-info/INSTALLER >/dev/null 2>&1 \
	  && $(BIN)/python -m pip --version >/dev/null 2>&1; \
	then python=$(BIN)/python; else python="$(PYTHON)"; fi; \
	version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])') || { \
	  echo "make: '$$python' does not run. Install Python >= 3.11, or name one:" \
	    "make PYTHON=/path/to/python3" >&2; exit 1; }; \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: dspark_hf needs Python >= 3.11, and '$$python' is $$version." \
	    "Name a newer one: make clean, then make PYTHON=python3.12 ..." >&2; exit 1; }; \
	[ "$$python" = $(BIN)/python ] || $$python -m venv --clear $(VENV) || { \
	  echo "make: '$$python -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	@touch $@

# The constraints hold in every install: they pin what was tested, and an unpinned torch may bring
# a build of several GB. A package folder without INSTALLER was left by an install that was cut
# off; pip would take it for installed, so its record goes first.
define install
@for info in $(VENV)/lib/python*/site-packages/*.dist-info; do \
  [ -f "$$info/INSTALLER" ] || rm -rf "$$info"; \
done
$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(1)]"
endef

$(VENV)/.stamp-zoo: pyproject.toml constraints.txt $(VENV)/.stamp-venv
	$(call install,zoo)
	@touch $@

$(VENV)/.stamp-browser: pyproject.toml constraints.txt $(VENV)/.stamp-test
	$(call install,demo$(comma)browser)
	@touch $@

$(VENV)/.stamp-demo: pyproject.toml constraints.txt $(VENV)/.stamp-venv
	$(call install,demo$(comma)zoo)
	@touch $(VENV)/.stamp-zoo $@

$(VENV)/.stamp-train: pyproject.toml constraints.txt $(VENV)/.stamp-venv
	$(call install,train$(comma)zoo)
	@touch $(VENV)/.stamp-zoo $@

$(VENV)/.stamp-test: pyproject.toml constraints.txt $(VENV)/.stamp-venv
	$(call install,test$(comma)train$(comma)zoo)
	@touch $(VENV)/.stamp-zoo $(VENV)/.stamp-train $@
