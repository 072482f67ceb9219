# Each target does its own set-up and is quick the second time.
#
#   make demo    see what it does                 make check   ruff, mypy, import-linter, unit tests
#   make test    every test, as root and as an    make bench   side by side with ipykernel
#                ordinary user, on cgroup v1 and v2   make serve   the HTTP API on this machine
#   make test-v2 every behaviour of sandbox and kernel on cgroup v2, in emulated machines, as root and as an ordinary user: an hour or two

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo serve test test-v2 check bench clean

PYTHON ?= python3
BIN := .venv/bin
export HOLDFAST_HOME := $(CURDIR)/.home

help:
	@sed -n 's/^#   //p' Makefile

demo: .stamps/guests
	@$(BIN)/holdfast demo

serve: .stamps/guests
	@$(BIN)/holdfast serve

test: .stamps/lint .stamps/guests .stamps/vm .stamps/browser
	$(BIN)/python tests/stages.py

test-v2: .stamps/lint .stamps/guests .stamps/vm
	$(BIN)/python tests/vm/machine.py
	$(BIN)/python tests/vm/machine.py --user 61234

check: .stamps/lint
	$(BIN)/python -m pytest tests/unit tests/contract -n 3 --dist loadfile

bench: .stamps/guests .stamps/bench
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.snapshots
	$(BIN)/python -m bench.transactions
	$(BIN)/python -m bench.faces
	$(BIN)/python -m bench.served

clean:
	rm -rf .venv .stamps build dist

.stamps/system: tools/system-packages
	@mkdir -p .stamps
	@tools/system-packages $(PYTHON)
	@touch $@

.stamps/venv: pyproject.toml setup.py $(wildcard src/holdfast/*.c src/holdfast/*/*.c) | .stamps/system
	@tools/make-venv $(PYTHON) .venv
	@touch $@

.stamps/lint: .stamps/venv $(shell find src tests bench -name '*.py')
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@touch $@

# The guests' own Python environment, built by uv under the home.
.stamps/guests: .stamps/venv src/holdfast/guest-environment/requirements.txt
	@$(BIN)/python -m holdfast.cli.progress --home $(HOLDFAST_HOME)
	@touch $@

.stamps/vm: .stamps/venv tests/vm/debian.py
	@$(BIN)/python tests/vm/boot.py --prepare
	@touch $@

# For the test that works in JupyterLab; without it that one is skipped.
.stamps/browser: tools/system-packages
	@mkdir -p .stamps
	@tools/system-packages $(PYTHON) chromium
	@touch $@

.stamps/bench: .stamps/venv
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --group bench
	@touch $@
