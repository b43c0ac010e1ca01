# The commands of this project. `make demo` and `make test` do all their own set-up: Python 3.11 and make are enough.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
WORKERS ?= 2

.PHONY: demo test test-library test-lab test-studies test-all test-whole check check-types check-lines installs mutants clean
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Two stamps, so that the demo does not wait for linters. Tests run on `.[all]`, the line of the README, so that pins
# which contradict each other are noticed. Python compiles what is imported, as it is imported: pip would compile all.
PACKAGES := pyproject.toml lab/pyproject.toml studies/pyproject.toml constraints.txt
$(VENV)/.installed-run: $(PACKAGES) | $(BIN)/python
	$(PIP) --editable '.[lab]' --editable ./lab --editable ./studies
	touch $@

$(VENV)/.installed-develop: $(PACKAGES) | $(BIN)/python
	$(PIP) --editable '.[all,test,lint,docs]' --editable ./lab --editable ./studies
	touch $(VENV)/.installed-run $@

demo: $(VENV)/.installed-run
	$(BIN)/python examples/demo.py --out runs/demo

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

# What a change needs; `test-all` adds what is slow: kills, several processes, browsers, compilers, matrices in pairs.
LIBRARY := tests
LAB := lab/tests
STUDIES := studies/tests
test: $(VENV)/.installed-develop
	$(PYTEST) $(LIBRARY) $(LAB) $(STUDIES) -m "not slow"

test-library: $(VENV)/.installed-develop
	$(PYTEST) $(LIBRARY) -m "not slow"

test-lab: $(VENV)/.installed-develop
	$(PYTEST) $(LAB) -m "not slow"

test-studies: $(VENV)/.installed-develop
	$(PYTEST) $(STUDIES) -m "not slow"

test-all: $(VENV)/.installed-develop
	$(PYTEST) $(LIBRARY) $(LAB) $(STUDIES)

# `test-all` takes rows of large tables in which any two values meet; this takes every row, in hours.
test-whole: $(VENV)/.installed-develop
	WELLPOSED_WHOLE_TABLES=1 $(PYTEST) $(LIBRARY) $(LAB) $(STUDIES)

# Two at a time: pyright alone takes as long as the others.
check: $(VENV)/.installed-develop
	$(MAKE) --no-print-directory --jobs=2 check-types check-lines
	$(PYTEST) src lab/wellposed_lab studies/wellposed_studies

check-types: $(VENV)/.installed-develop
	$(BIN)/pyright

check-lines: $(VENV)/.installed-develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py
	$(BIN)/python tools/prose.py
	$(BIN)/zensical build --clean --strict

# Not in CI: gigabytes, or half an hour.
installs:
	$(PYTHON) tools/installs.py

mutants: $(VENV)/.installed-develop
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutants --workers $(WORKERS)

clean:
	rm -rf $(VENV) runs site build dist .pytest_cache .ruff_cache .hypothesis
