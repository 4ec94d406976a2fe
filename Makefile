# Two commands: `make serve` and `make test`. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test lint bench train-builtin clean

serve: $(VENV)/.serve
	$(BIN)/foretoken serve $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core draft radix_cache api bench

bench: $(VENV)/.bench
	$(BIN)/foretoken bench engine $(ARGS)

train-builtin: $(VENV)/.serve
	$(BIN)/python -m foretoken.draft.builtin.train $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e ".[test]"
	touch $@ $(VENV)/.serve

$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e ".[bench]"
	touch $@
