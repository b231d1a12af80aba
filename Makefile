# The commands that people need; `make` alone lists them. It needs nothing that a machine with a compiler has not, where
# `just` would be one more program to install.

VENV ?= .venv
export PATH := $(abspath $(VENV))/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup check test ci release

help:  ## list these commands
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup:  ## an environment in .venv with everything, and hooks that check each commit
	python3 -m venv $(VENV)
	pip install uv
	uv pip install --python $(VENV)/bin/python --editable '.[dev]'
	pre-commit install

check:  ## lint, types, imports: what takes seconds
	pre-commit run --all-files --hook-stage pre-push

test:  ## what starts no process; `make test TESTS=tests/driver/test_brain.py` for less, TESTS=tests for all
	pytest -n 2 $(or $(TESTS),tests --ignore=tests/scenarios)

ci:  ## all that must pass before a change lands, in an environment of its own
	bash .ci/run

release:  ## walk through a release: make release VERSION=0.1.0
	python tools/release.py $(VERSION)
