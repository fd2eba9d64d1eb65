# make train   set up, then train a small GPT on this machine's CPU and show what came of it
# make test    set up, then run the tests that every change must pass
# make test-all  set up, then run the full matrix too (more than an hour on two cores)
# make setup   only make the virtual environment .venv
# make lint    set up, then format check, lint and types

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: setup train test test-all lint
setup: $(STAMP)

# The stamp is touched last: an installation that was interrupted is taken up again.
$(STAMP): setup.py constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools wheel
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev,bitsandbytes]'
	touch $(STAMP)

train: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" examples/quickstart.sh

test: setup
	$(VENV)/bin/python -m pytest

test-all: setup
	$(VENV)/bin/python -m pytest -m ''

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
