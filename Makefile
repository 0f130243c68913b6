# Every target works in a fresh clone: what it needs is installed into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STUBS := clients/python
VLLM_VENV := .venv-vllm

.PHONY: help env build proto check test test-slow test-vllm demo bench clean

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

env: $(STAMP) ## Make .venv with everything the project needs, and build the core.

$(STAMP): pyproject.toml setup.py constraints.txt clients/python/pyproject.toml \
		clients/vllm/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'schedsvc needs Python 3.11 or newer; try: make PYTHON=python3.12' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools cython
	$(PIP) --no-build-isolation -e clients/python -e clients/vllm -e '.[dev]'
	touch $@

build: $(STAMP) ## Rebuild the compiled core after a change in _core/.
	$(BIN)/python setup.py --quiet build_ext --inplace

proto: $(STAMP) ## Generate the stubs of proto/ anew.
	$(BIN)/python -m grpc_tools.protoc -Ischedsvc_client/v1=proto/schedsvc/v1 \
		--plugin=$(BIN)/protoc-gen-mypy --plugin=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=$(STUBS) --mypy_out=quiet:$(STUBS) \
		--grpc_python_out=$(STUBS) --mypy_grpc_out=quiet:$(STUBS) \
		schedsvc_client/v1/scheduler.proto

check: build ## Lint, types, contract drift, house rules.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd proto && ../$(BIN)/buf lint
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/tidy

test: build ## The whole suite: no GPU, no network.
	$(BIN)/python -m pytest -q -m 'not slow and not vllm'

test-slow: build ## What is too slow for every change.
	$(BIN)/python -m pytest -q -m 'slow and not vllm'

test-vllm: build $(VLLM_VENV)/.installed ## The gate on the real vLLM: its CPU build, no GPU, 4 GB.
	$(BIN)/python -m pytest -q -m vllm tests/vllm

$(VLLM_VENV)/.installed: tests/vllm/install.sh tests/vllm/make_model.py tests/vllm/sched_yield.c \
		clients/python/pyproject.toml clients/vllm/pyproject.toml
	PYTHON=$(PYTHON) tests/vllm/install.sh $(VLLM_VENV)
	touch $@

demo: build ## The noisy neighbour, without and with the scheduler, on the embedded emulator.
	$(BIN)/schedsvc demo --out out/demo

bench: build ## Admission latency at every rung, each beside its reference.
	$(BIN)/python -m bench --out out/bench

clean: ## Remove what was built.
	rm -rf $(VENV) $(VLLM_VENV) build out schedsvc/*.so _core/*.c clients/node/node_modules
