# Everything that is done with this repository. `make` alone lists it.

# The newest Python that works; `make setup PYTHON=/path/to/python` to choose. Used only to create .venv.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$python; break; fi; done)

VENV := .venv
# The environment of `make test-newest`: another Python, which the lock gives a newer JAX.
VENV_NEWEST := .venv-newest
# The environment of `make test-next`: a JAX that pyproject.toml does not allow yet.
VENV_NEXT := .venv-next
# All laws but the sweeps over single operators: `make test-newest LAWS=tests/laws` runs those too.
SWEEPS := linear rules_complete rules_sound
LAWS ?= tests/laws $(SWEEPS:%=--ignore=tests/laws/test_%.py)
SAMPLE ?=  # of the cases of `make test-newest`: `--one-in 4` takes a quarter
BIN := $(VENV)/bin
PROJECTS := pyproject.toml packages/m4/pyproject.toml
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Test processes at a time (each has 8 virtual devices); `make test WORKERS=0` for one process. A file's tests run in one
# process, because they share what JAX has compiled.
WORKERS ?= logical
PYTEST_OPTIONS := --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile
PYTEST := $(BIN)/python -m pytest $(PYTEST_OPTIONS)
# XLA as users have it; in the fast tests LLVM does not optimise (tests/conftest.py).
OPTIMISED := JAX_DISABLE_MOST_OPTIMIZATIONS=0
# What `make quick` runs: one in ten of the cases of each test, and all of those that are marked quick.
QUICK_LAWS := any_program linear predicted_is_emitted propagate_laws reshard_any rules_complete rules_sound same_numbers \
	split_roundtrip
QUICK := tests/test_structure.py tests/test_golden.py tests/test_imports.py \
	$(patsubst %,tests/%,core comm language rules solver) $(QUICK_LAWS:%=tests/laws/test_%.py)

.DEFAULT_GOAL := help
.PHONY: help setup quick test test-full test-newest test-next lint format types docs operators machines gallery screenshots demo bench jax-tests lock clean

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP)  ## create .venv with the locked packages (again only when they change)

$(STAMP): requirements.lock $(PROJECTS)
	@# A Python without ensurepip (some distributions cut it out) lends its own pip instead.
	@$(PIP) --version >/dev/null 2>&1 || { \
		test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found: make setup PYTHON=/path/to/python" >&2; exit 1; }; \
		$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
			$(PYTHON) -m venv --clear --without-pip $(VENV) && \
			$(PYTHON) -m pip --python $(BIN)/python install -qq pip; }; }
	@echo "Installing the packages of requirements.lock into $(VENV) ($$($(BIN)/python --version))"
	@$(PIP) install -qq -r requirements.lock
	@$(PIP) install -qq --no-deps --no-build-isolation --editable . --editable packages/m4
	@touch $@

quick: setup lint  ## what to run before each commit, in some two minutes: style, structure, a sample of rules and laws
	$(PYTEST) -m "quick or not (slow or network)" --one-in 10 $(QUICK)

test: setup lint types docs  ## what a change must pass: lint, types, documentation, fast tests
	$(PYTEST)

test-full: setup lint types docs  ## the same with the long sweeps
	$(OPTIMISED) $(PYTEST) -m "not network" --timeout 3600

test-newest: setup  ## run the laws on the newest JAX, if .venv has another one and a Python for it is found
	@python=$$($(BIN)/python scripts/newest_python.py) && if test -n "$$python"; then \
		$(MAKE) --no-print-directory setup VENV=$(VENV_NEWEST) PYTHON="$$python" && \
		$(OPTIMISED) $(VENV_NEWEST)/bin/python -m pytest $(PYTEST_OPTIONS) $(SAMPLE) $(LAWS); fi

test-next: setup  ## run the laws on a JAX beyond the bound in pyproject.toml, if there is one: may the bound be raised?
	@found=$$($(BIN)/python scripts/next_jax.py) && set -- $$found && if test -n "$$2"; then \
		$(MAKE) --no-print-directory setup VENV=$(VENV_NEXT) PYTHON="$$1" && \
		$(VENV_NEXT)/bin/python -m pip --disable-pip-version-check install -qqq "jax==$$2" && \
		$(VENV_NEXT)/bin/python -m pytest $(PYTEST_OPTIONS) $(LAWS) && \
		echo "The laws hold on JAX $$2: raise the bound in pyproject.toml, then make lock"; fi

lint: $(STAMP)  ## check style
	$(BIN)/ruff check

format: $(STAMP)  ## let ruff lay out the code and repair what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

types: $(STAMP)  ## check annotations, and that they are right in a user's program
	$(BIN)/mypy
	MYPYPATH=src $(BIN)/mypy --strict --config-file= --follow-imports=silent --cache-dir=.mypy_cache/user tests/api/typed_program.py

docs: $(STAMP)  ## build the pages of gshard in docs/_build and those of m4 in docs/_build/m4; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build
	$(BIN)/sphinx-build -W --keep-going -q -b html -c docs -D project=m4 -D html_title=m4 packages/m4/docs docs/_build/m4

operators: $(STAMP)  ## write src/gshard/rules/OPERATORS.md anew from the rules
	$(BIN)/python scripts/operators.py

machines: $(STAMP)  ## write the table of docs/machines.md anew from the kinds of machines
	$(BIN)/python scripts/machines.py

gallery: $(STAMP)  ## write docs/gallery.md anew from examples/
	$(BIN)/python scripts/gallery.py

screenshots: $(STAMP)  ## take the pictures of docs/images anew (needs Chromium)
	$(BIN)/python scripts/screenshots.py

demo: $(STAMP)  ## train, evaluate and use a small translation model
	$(BIN)/python -m gshard_m4 demo

bench: $(STAMP)  ## run every script of benchmarks/
	@for script in benchmarks/*.py; do test -e "$$script" || continue; echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

jax-tests: $(STAMP)  ## run JAX's own tests of jax.jit on gshard.jit (TESTS=path/to/jax/tests)
	@test -n "$(TESTS)" || { echo "Name the tests of a checkout of JAX: make jax-tests TESTS=path/to/jax/tests" >&2; exit 1; }
	$(BIN)/python tests/jax_api/run.py "$(TESTS)"

# One interpreter for each Python whose versions the lock tells apart.
LOCK_PYTHONS ?= python3.11 python3.12 python3.13
lock:  ## rewrite requirements.lock from both pyproject.toml (LOCK_PYTHONS="..." names the Pythons)
	$(or $(PYTHON),python3) scripts/lock.py $(LOCK_PYTHONS)

clean:  ## remove what was built, except the environments
	rm -rf build dist packages/m4/build packages/m4/dist docs/_build .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src packages tests benchmarks examples docs scripts -name __pycache__ -type d -prune -exec rm -rf {} +
