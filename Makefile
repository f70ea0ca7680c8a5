# What people do here. `make help` lists it.
PYTHON ?= python

.DEFAULT_GOAL := help
.PHONY: help install check format test coverage docs figures

help:  ## list these
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  \1\t\2/' | expand -t 14

install:  ## all that developing needs, editable, into the current environment
	$(PYTHON) -m pip install -e ".[dev]"

check:  ## style, types, import contracts, architecture
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m basedpyright --pythonpath "$$($(PYTHON) -c "import sys; print(sys.executable)")"
	$(PYTHON) -m pytest tests/test_architecture.py

format:  ## bring all files into the one style
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

test:  ## all tests, two files at a time: many of them wait for ranks to start
	$(PYTHON) -m pytest -n 2 --dist loadfile

coverage:  ## all tests, and which lines they reach
	$(PYTHON) -m pytest --cov=fedshard --cov-report=term-missing

docs:  ## the pages, into docs/_build/html; a warning is an error
	$(PYTHON) -m sphinx -W --keep-going -b html docs docs/_build/html

figures:  ## the docs' figures, by their scripts
	$(PYTHON) docs/figures/round.py
