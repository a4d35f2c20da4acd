# make demo: set everything up and train on this machine; make test: set everything up and test. Both can be repeated.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check install clean

demo: .venv/installed
	$(BIN)/freerun train demo

test: .venv/installed-dev check
	$(BIN)/python -m pytest

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/installed

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,hf,figures,tensorboard,peers]'
	touch $@

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache
