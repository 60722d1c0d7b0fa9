# Two commands matter: `make demo` and `make test`. Both set everything up on a fresh machine.
# `make check` is the short form of `make test` while you work.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
STAMP  := $(VENV)/.ready-dev

.NOTPARALLEL:
.PHONY: setup demo test check lint format bench soak sbom audit-packages packages release key lock docs clean

setup: $(STAMP)

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Every file is compared with its hash, but for torch: the build that this machine's index offers, with what only that needs.
LOCKED := $(PIP) --require-hashes --no-deps -r
TORCH  := $(PIP) -c constraints.txt torch
ITSELF := $(PIP) --no-deps --no-build-isolation -e .

# What the demo needs; the tests need all extras on top.
$(READY): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) requirements.lock
	$(TORCH)
	$(ITSELF)
	$(BIN)/python -m pip check
	touch $(READY)

$(STAMP): $(READY) requirements-dev.lock
	$(LOCKED) requirements-dev.lock
	$(BIN)/python -m pip check
	touch $(STAMP)

demo: $(READY)
	$(BIN)/fedbicross demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/deptry src

# Two workers, each with one thread. A file is never split: its fixtures serve all of it. With Python's caches, even
# where they are off: without them each worker rewrites all tests again, and each process of a test compiles the package.
WORKERS ?= 2
PYTEST  := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

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

# What the demo's environment consists of, as CycloneDX JSON: of one made for this, since that of the tests holds more. The tool
# lives in another. Where the package itself was installed from is of no interest, and a path of this machine.
sbom:
	$(MAKE) VENV=.venv-sbom/demo .venv-sbom/demo/.ready
	$(PYTHON) -m venv .venv-sbom/tool
	.venv-sbom/tool/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom
	.venv-sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o sbom.json \
	  .venv-sbom/demo/bin/python
	@! grep -n 'file:' sbom.json

# Known holes in what is locked, by a tool in an environment of its own. Whether a database answers shows by a version with known
# holes: a mirror may have the packages and know of none. --strict: what the database does not have is an error.
AUDIT := .venv-sbom/audit/bin
KNOWN := import requests; requests.get("https://pypi.org/pypi/jinja2/2.10/json", timeout=30).json()["vulnerabilities"][0]
audit-packages:
	@$(PYTHON) -m venv .venv-sbom/audit
	@{ $(AUDIT)/python -m pip install --quiet --disable-pip-version-check pip-audit && $(AUDIT)/python -c '$(KNOWN)'; } \
	  2> /dev/null || { echo 'audit-packages: no database of known holes can be reached; nothing was checked' >&2; exit 2; }
	$(AUDIT)/pip-audit -r requirements.lock --require-hashes --disable-pip --strict

# Both packages, of the last commit and nothing else: the same to the byte for whoever builds it.
packages: $(READY)
	rm -rf dist && mkdir -p dist/source
	git archive HEAD | tar -x -C dist/source
	cd dist/source && SOURCE_DATE_EPOCH=$$(git -C '$(CURDIR)' log -1 --format=%ct) \
	  '$(abspath $(BIN))/python' -m hatchling build -d ..
	rm -rf dist/source

# What is published: the packages, the parts, the SHA-256 of each, signed with KEY (`ssh-keygen -t ed25519`). docs/security.md says
# how to check it.
release: key sbom packages
	cp sbom.json dist/
	cd dist && sha256sum * > SHA256SUMS
	ssh-keygen -q -Y sign -n fedbicross -f '$(KEY)' dist/SHA256SUMS

key:
	@test -n '$(KEY)' || { echo 'make release KEY=your-private-key' >&2; exit 2; }

# Newer versions, for Python 3.11 and later on Linux and macOS, with the hashes of all their files. Not of torch and what only its
# builds for a GPU need: which one is right depends on the machine.
OF_TORCH := torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime \
  cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
COMPILE  := .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --upgrade --generate-hashes --no-header \
  --no-annotate -c constraints.txt $(addprefix --no-emit-package ,$(OF_TORCH)) pyproject.toml -
BUILDING := printf 'hatchling>=1.25\neditables>=0.5\n'
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(BUILDING) | $(COMPILE) -o requirements.lock
	$(BUILDING) | $(COMPILE) -c requirements.lock --extra dev -o requirements-dev.lock

docs: $(STAMP)
	$(BIN)/python -m docs.build
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . site

clean:
	rm -rf $(VENV) .venv-sbom .venv-lock site
