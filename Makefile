# Everything runs in a virtual environment inside the checkout; `make` sets it up on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DEMO_READY := $(VENV)/ready-demo
# Nothing, or what torch needs to survive where a processor advertises more than it can do.
SAFELY = env $$($(BIN)/python tests/cpu_isa.py)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test quick check format bench hunt docs clean

demo: $(DEMO_READY) ## the main job on real weights and real photographs, offline
	$(SAFELY) $(BIN)/python -m torchhook.demo

test: $(READY) ## all tests
	$(BIN)/python -m pytest -n auto

quick: $(READY) ## the tests that take seconds
	$(BIN)/python -m pytest -n auto -m "not slow"

check: $(READY) ## lint, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## speed beside bare hooks and other libraries, as ratios: tables, JSON and benchmarks/README.md
	test -x $(VENV)/peers/bin/python || PYTHON=$(BIN)/python sh benchmarks/peers.sh $(VENV)/peers
	$(SAFELY) $(BIN)/python benchmarks/run.py

hunt: $(READY) ## an interrupt at every line that any tool executes, 10,000 new programs, 500 kills; takes hours
	$(BIN)/python -m tests.interrupts
	$(SAFELY) $(BIN)/python -m tests.programs
	$(SAFELY) $(BIN)/python -m tests.extract.kills --count 500

docs: $(READY) ## the site, into site/: every example runs, and a warning is an error
	$(BIN)/python -m pytest tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist demo site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# torch goes first and pinned: unpinned, some other package would choose a build, and with it gigabytes of CUDA.
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch
	touch $@

$(DEMO_READY): $(VENV)/torch pyproject.toml
	$(PIP) -e ".[demo]"
	touch $@

$(READY): $(VENV)/torch pyproject.toml
	$(PIP) -e ".[dev]"
	touch $@
