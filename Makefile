# Two commands matter: `make demo` and `make test`. Both set everything up on a fresh machine.
# `make check` is the short form of `make test` while you work.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
STAMP  := $(VENV)/.ready-dev

.PHONY: setup demo test check lint format bench soak sbom docs clean

setup: $(STAMP)

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# What the demo needs; the tests need all extras on top.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $(READY)

$(STAMP): $(READY)
	$(PIP) -e '.[dev]'
	touch $(STAMP)

demo: $(READY)
	$(BIN)/fedbicross demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/deptry src

# Two workers, each with one thread. A file is never split: its fixtures serve all of it.
WORKERS ?= 2
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: lint
	$(PYTEST)

check: lint
	$(PYTEST) -m 'not slow'

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.cpu

# Uploads made up, verbs killed, files damaged; ends with an error if anything but a plain refusal comes of it.
MINUTES ?= 10
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

# What the demo's environment consists of, as CycloneDX JSON; the tool lives in an environment of its own.
sbom: $(READY)
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom
	.venv-sbom/bin/cyclonedx-py environment --output-reproducible --of JSON -o sbom.json $(BIN)/python

docs: $(STAMP)
	$(BIN)/python -m docs.build
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . site

clean:
	rm -rf $(VENV) .venv-sbom site
