# The whole project in a few words: make demo, make test. Everything is installed into .venv; nothing else is touched.
#
#   PYTHON=python3.12 make demo         another interpreter
#   PIP_EXTRA_INDEX_URL=..., PIP_FIND_LINKS=...   reach pip as they are, e.g. for the CPU build of torch

SHELL := /bin/bash
PYTHON ?= python3
CXX ?= g++
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := $(BIN)/python tools/requirements.py
SITE := $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Stamps: what a finished step leaves behind, so that it is not done again.
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
DEVELOPMENT := $(VENV)/.development
NATIVE_SOURCES := $(shell find csrc cmake -name '*.hpp' -o -name '*.cpp' -o -name '*.cmake') CMakeLists.txt

.PHONY: help demo dev test test-full lint format docs build clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       install into .venv, run the guide's example with 8 ranks on CPUs, check every bit"
	@echo "make test       every test that needs no GPU"
	@echo "make test-full  those and the ones that are too long for CI"
	@echo "make dev        installs what tests and lint need"
	@echo "make lint       formatting, types, rules of the tree"
	@echo "make format     formats Python and C++"
	@echo "make docs       prints the generated tables of docs/ again"
	@echo "make build      (re)builds the extension"
	@echo "make clean      removes .venv, build folders and caches"

demo: $(INSTALLED)
	$(BIN)/python -m mori.demo

dev: $(INSTALLED) $(DEVELOPMENT)

test: $(INSTALLED) $(DEVELOPMENT)
	$(BIN)/python -m pytest -m "not gpu and not full"

test-full: $(INSTALLED) $(DEVELOPMENT)
	$(BIN)/python -m pytest -m "full or not gpu"

lint: $(INSTALLED) $(DEVELOPMENT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find csrc -name '*.hpp' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy
	$(BIN)/python tools/check_tree.py

format: $(DEVELOPMENT)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	find csrc -name '*.hpp' -o -name '*.cpp' | xargs $(BIN)/clang-format -i

docs: $(INSTALLED)
	$(BIN)/python tools/generated_docs.py --write

build: $(INSTALLED)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A torch that the interpreter already has is used: it is by far the largest download. An interpreter that lives in a
# virtual environment itself does not hand its packages on; then a .pth file leads to them.
$(CREATED):
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON); set PYTHON to a Python 3.10 or later" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is $$($(PYTHON) -V); mori needs Python 3.10 or later: set PYTHON" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@if folder=$$($(PYTHON) tools/requirements.py --have-torch); then \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
		$(REQUIREMENTS) --have-torch >/dev/null || echo "$$folder" >$$($(SITE))/torch_of_the_interpreter.pth; \
	else \
		$(PYTHON) -m venv $(VENV) && $(PIP) $$($(REQUIREMENTS) dev --only torch); \
	fi
	@touch $@

$(INSTALLED): $(CREATED) pyproject.toml $(NATIVE_SOURCES)
	@command -v $(CXX) >/dev/null || { echo "make: there is no C++ compiler $(CXX); on Debian and Ubuntu: apt install build-essential" >&2; exit 1; }
	@PYTHON_HEADER=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h; test -e $$PYTHON_HEADER || \
		{ echo "make: $$PYTHON_HEADER is missing; on Debian and Ubuntu: apt install python3-dev" >&2; exit 1; }
	$(PIP) $$($(REQUIREMENTS) build)
	CXX=$(CXX) $(PIP) --no-build-isolation --config-settings=cmake.define.MORI_WERROR=ON --editable .
	@touch $@

$(DEVELOPMENT): $(CREATED) pyproject.toml
	$(PIP) $$($(REQUIREMENTS) dev --without torch)
	@touch $@
