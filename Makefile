# Every target works in a fresh clone: what it needs is installed into .venv first.
PYTHON ?= python3
# Where `make install` makes an environment.
PREFIX ?= /opt/schedsvc
RIGHT_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo 'schedsvc needs Python 3.11 or newer; try: make PYTHON=python3.12' >&2; exit 1; }
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# How the core is compiled, for all but wheels and measurements (_core/flags.toml).
DEVELOPMENT := SCHEDSVC_CORE=development
STUBS := clients/python
GO_STUBS := $(CURDIR)/clients/go
GO_MODULE := github.com/schedsvc/schedsvc/clients/go
REFERENCE := docs/reference/contract.md
# Their .proto files have messages only.
NO_RPCS := cluster judgement leader mode pool quota tenants usage
VLLM_VENV := .venv-vllm
CHART_VENV := .venv-chart
INTEROP_VENV := .venv-interop
FRONTS_VENV := .venv-fronts
LITELLM_VENV := .venv-litellm
# A tree without the packages, and an environment with those of dist/.
LAB_TREE := build/test-lab
# More than the cores of a small machine: many tests wait for processes of their own.
TESTS_AT_ONCE ?= 3
# Folders that other targets run: the house rules, and what needs the real vLLM.
ELSEWHERE := --ignore tests/tidy --ignore tests/vllm
# The files with tests of a mark: to collect all others for a few takes longer than to run these. A
# conftest.py that gives the mark to tests of its folder stands for the folder.
MARKED = $(shell grep -rlE 'mark\.$(1)\b' tests --include='test_*.py' --include=conftest.py \
	| sed 's|/conftest\.py$$||')
# Tests by their mark, with options. What fails beside other work is run once more by itself: how
# soon a process runs is the machine's affair. What fails twice fails; a crash is not tried again.
LOOK = $(BIN)/python -m pytest -q --max-worker-restart 0 --durations=12 --durations-min=4 \
	-m $(1) $(3)
AGAIN = test $$? -eq 1 && echo 'Once more, by themselves:' && $(LOOK) --lf --lfnf none
RUN = $(LOOK) $(2) || { $(AGAIN); }
# The same for the tests of a lane, which a file lists. That none has the mark (status 5) is fine.
LANE = test ! -s $(3) || $(call LOOK,$(1),,@$(3)) $(2) || \
	{ code=$$?; test $$code -eq 5 || { (exit $$code); $(call AGAIN,$(1),,@$(3)); }; }
# Without its cache each process of the tests compiles all 500 modules of them again: 12 s.
unexport PYTHONDONTWRITEBYTECODE
# Fresh with each change, and yet the same for all who run it.
FRESH_SEED := $(shell echo $$((0x8$$(git rev-parse --verify -q 'HEAD^{tree}' | cut -c1-11))))
# Seeds from 2^48 on have a caller that acts against all others.
HOSTILE_SEED := $(shell echo $$(($(FRESH_SEED) + (1 << 48))))

.PHONY: help install env build build-release proto proto-go spec check test test-slow mutants \
	lane-slow lane-mutants test-browser test-fronts test-litellm test-go test-java test-cpp \
	test-faults \
	test-fuzz test-vllm test-vllm-rest test-vllm-alone test-vllm-slow test-interop vllm-pairs \
	vllm-cost cluster-shares \
	cluster-seeds failovers usage-proof judgement-runs advise-bars tree-proof \
	demo demo-failover demo-cluster bench dist test-dist test-lab image test-image test-chart clean

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

install: ## Install the service and its laboratory into PREFIX: no developer tools.
	@$(RIGHT_PYTHON)
	test -x $(PREFIX)/bin/python || $(PYTHON) -m venv $(PREFIX)
	@# setuptools would put modules into the packages that are no longer in the tree.
	find build lab/build -path '*/lib*' -name '*.py' -delete 2> /dev/null || true
	@# All are built by one pair of tools beside PREFIX, instead of a pair for each.
	$(PREFIX)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		-c constraints.txt --target build/tools 'setuptools>=77' 'cython>=3.1,<4'
	SCHEDSVC_CORE=release PYTHONPATH=$(CURDIR)/build/tools $(PREFIX)/bin/python -m pip install \
		--quiet --disable-pip-version-check --no-build-isolation -c constraints.txt \
		./clients/python ./clients/vllm . ./lab 'schedsvc[top]'
	@echo 'Installed. Start with: $(PREFIX)/bin/schedsvc quickstart'

env: $(STAMP) ## Make .venv with everything the project needs, and build the core.

$(STAMP): pyproject.toml setup.py constraints.txt clients/python/pyproject.toml \
		clients/vllm/pyproject.toml clients/litellm/pyproject.toml lab/pyproject.toml lab/setup.py
	@$(RIGHT_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools cython
	$(DEVELOPMENT) $(PIP) --no-build-isolation -e clients/python -e clients/vllm -e clients/litellm \
		-e 'lab[cluster]' -e '.[dev]'
	touch $@

build: $(STAMP) ## Rebuild the core after a change in _core/, for development: not optimised.
	$(DEVELOPMENT) $(BIN)/python setup.py --quiet build_ext --inplace
	cd lab && $(DEVELOPMENT) ../$(BIN)/python setup.py --quiet build_ext --inplace

build-release: $(STAMP) ## Rebuild the core as wheels have it, for what measures its speed.
	SCHEDSVC_CORE=release $(BIN)/python setup.py --quiet build_ext --inplace
	cd lab && SCHEDSVC_CORE=release ../$(BIN)/python setup.py --quiet build_ext --inplace

proto: $(STAMP) ## Generate the stubs of proto/, and docs/reference/contract.md.
	rm -rf build/stubs && mkdir -p build/stubs
	$(BIN)/python -m grpc_tools.protoc -Iproto \
		--plugin=$(BIN)/protoc-gen-mypy --plugin=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=build/stubs --mypy_out=quiet:build/stubs \
		--grpc_python_out=build/stubs --mypy_grpc_out=quiet:build/stubs \
		--descriptor_set_out=build/stubs/contract.binpb --include_source_info \
		proto/schedsvc/v1/*.proto
	rm -f $(foreach name,$(NO_RPCS),build/stubs/schedsvc/v1/$(name)_pb2_grpc.py*)
	@# The package of the stubs is schedsvc_client; protoc names it after the folder of the .proto.
	sed -i -E 's/\bschedsvc\.v1(\.\w+_pb2|  *import )/schedsvc_client.v1\1/g' \
		build/stubs/schedsvc/v1/*.py*
	mkdir -p $(STUBS)/schedsvc_client/v1
	cp build/stubs/schedsvc/v1/*.py* $(STUBS)/schedsvc_client/v1/
	$(BIN)/python -m deploy.reference build/stubs/contract.binpb $(REFERENCE)

proto-go: ## Generate the stubs of the Go client, by protoc and its plug-ins for Go.
	cd proto && protoc -I. --go_out=$(GO_STUBS) --go_opt=module=$(GO_MODULE) \
		--go-grpc_out=$(GO_STUBS) --go-grpc_opt=module=$(GO_MODULE) schedsvc/v1/*.proto

spec: $(STAMP) ## Generate what follows from the settings in spec/.
	$(BIN)/python -m spec.generate

handbook: build ## Generate the pages of metrics and commands, and the schema of the file.
	$(BIN)/python -m deploy.handbook

check: build ## Lint, types, contract drift, house rules.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd proto && ../$(BIN)/buf lint
	$(BIN)/python -m pytest -q -p no:cacheprovider -n $(TESTS_AT_ONCE) tests/tidy

test: build ## All but slow tests and house rules: no GPU, no network. Three at a time, then one.
	$(call RUN,'not slow and not vllm and not install and not alone and not browser \
		and not fronts and not litellm and not go and not java and not cpp',\
		-n $(TESTS_AT_ONCE),$(ELSEWHERE))
	$(call RUN,'alone and not slow and not vllm and not install',,$(call MARKED,alone))

test-slow: build ## All that is too slow for every change, but for the mutants.
	$(call RUN,'slow and not vllm and not alone',-n $(TESTS_AT_ONCE),\
		$(filter-out tests/mutants/%,$(call MARKED,slow)))
	$(call RUN,'alone and slow and not vllm and not proof',,$(call MARKED,alone))

mutants: build ## All known bugs: each is put into the core, and a test has to catch it.
	$(call RUN,slow,-n $(TESTS_AT_ONCE),tests/mutants)

lane-slow: build ## In CI: slow tests whose subject changed, a quarter of the rest and of tables.
	$(BIN)/python -m tests.lanes --slow > build/lane-slow
	$(call LANE,'slow and not vllm and not alone',\
		-p tests.lanes.rows -n $(TESTS_AT_ONCE),build/lane-slow)
	$(call LANE,'alone and slow and not vllm and not proof',,build/lane-slow)

lane-mutants: build ## In CI: the known bugs in files that changed, or with tests that changed.
	$(BIN)/python -m tests.lanes --mutants > build/lane-mutants
	$(call LANE,slow,-n $(TESTS_AT_ONCE),build/lane-mutants)

test-browser: build ## The web console in a real Chromium; its screens go to out/console/.
	$(call RUN,browser,-n $(TESTS_AT_ONCE),tests/browser)

test-fronts: build $(FRONTS_VENV)/.installed ## The proxy behind HAProxy, nginx and Envoy.
	$(call RUN,fronts,-n $(TESTS_AT_ONCE),tests/fronts)

$(FRONTS_VENV)/.installed: tests/fronts/requirements.txt
	$(PYTHON) -m venv $(FRONTS_VENV)
	$(FRONTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

test-litellm: build $(LITELLM_VENV)/.installed ## The plug-in in LiteLLM's real proxy.
	$(call RUN,'litellm and not slow',,tests/litellm)

$(LITELLM_VENV)/.installed: clients/litellm/sample/requirements.txt clients/python/pyproject.toml \
		clients/litellm/pyproject.toml
	$(PYTHON) -m venv $(LITELLM_VENV)
	$(LITELLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(LITELLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-e clients/python -e clients/litellm
	touch $@

test-go: build ## The Go client, built from Debian's sources of gRPC.
	$(call RUN,go,-n $(TESTS_AT_ONCE),tests/go)

test-java: build ## The Java client, built by Maven from Debian's packages.
	$(call RUN,java,-n $(TESTS_AT_ONCE),tests/java)

test-cpp: build ## The C++ client, built by CMake from Debian's packages.
	$(call RUN,cpp,-n $(TESTS_AT_ONCE),tests/cpp)

test-faults: build ## Each seed that failed once, and 700 fresh ones (docs/understand/faults.md).
	$(BIN)/schedsvc simtest --regressions
	$(BIN)/schedsvc simtest --seed $(FRESH_SEED) --seeds 550
	$(BIN)/schedsvc simtest --seed $(HOSTILE_SEED) --seeds 150

test-fuzz: build ## Hostile input and random walks, the core watching its memory: two minutes.
	$(BIN)/python -m tests.fuzz --sanitised --seconds 4 --seed $(FRESH_SEED)
	$(BIN)/python -m tests.clients.exchanges --count 10000 --seed $(FRESH_SEED)
	$(BIN)/python -m tests.clients.streams --count 5000 --seed $(FRESH_SEED)

cluster-shares: build ## Weights 4:1 at two and four schedulers, by several ingresses: six minutes.
	$(BIN)/python -m pytest -q -s -p no:cacheprovider tests/cluster/test_shares.py

cluster-seeds: build ## 20,000 seeds of two to five schedulers in virtual time; hours, goes on.
	mkdir -p out
	nice -n 19 $(BIN)/schedsvc simtest --cluster --seed 67553994410557440 --seeds 20000 \
		--totals out/cluster-seeds.json

failovers: build ## 400 failovers under load, of four kinds; an hour as root, goes on.
	nice -n 5 $(BIN)/python -m tests.cluster.failovers --each 100 --out out/failovers

usage-proof: build ## A million requests, 20 kills, the ledger taken 20 times; goes on where it was.
	nice -n 19 $(BIN)/python -m tests.usage.proof --attacks 20 --out out/usage-proof

judgement-runs: build ## 2,000 random runs whose "ok" is compared with each request: two minutes.
	nice -n 19 $(BIN)/python -m tests.judgement.random_runs --count 2000

advise-bars: build ## Drafts of `advise` beside 200 random configurations: half an hour, goes on.
	nice -n 19 $(BIN)/python -m tests.lab.advise.bars --traces ../shared/data/traces \
		--out out/advise-bars

tree-proof: build ## A million random trees over one pool, and over three: seven hours, goes on.
	nice -n 19 $(BIN)/python -m tests.core.tree_histories --count 1000000 \
		--totals out/tree-proof.json
	nice -n 19 $(BIN)/python -m tests.core.tree_histories --count 1000000 --pools \
		--totals out/tree-proof-pools.json

test-vllm: test-vllm-rest test-vllm-alone ## The gate on the real vLLM, without a GPU; 4 GB.

test-vllm-rest: build $(VLLM_VENV)/.installed ## All of it that runs beside other work.
	$(call RUN,'vllm and not slow and not alone',-n 2 --dist loadgroup,tests/vllm)

test-vllm-alone: build $(VLLM_VENV)/.installed ## What compares times there.
	$(call RUN,'vllm and alone and not slow',,tests/vllm)

test-vllm-slow: build $(VLLM_VENV)/.installed ## What takes too long there for every change.
	$(BIN)/python -m pytest -q -m 'vllm and slow' tests/vllm

test-interop: build $(INTEROP_VENV)/.installed ## Ordinary HTTP clients at the gate and the proxy.
	$(BIN)/python -m tests.clients.interop

$(INTEROP_VENV)/.installed: $(wildcard tests/clients/sdks/*)
	$(PYTHON) -m venv $(INTEROP_VENV)
	$(INTEROP_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r tests/clients/sdks/requirements.txt
	mkdir -p $(INTEROP_VENV)/node
	cp tests/clients/sdks/package.json tests/clients/sdks/ask.mjs $(INTEROP_VENV)/node/
	! command -v npm > /dev/null || npm install --silent --no-audit --no-fund \
		--ignore-scripts --prefix $(INTEROP_VENV)/node
	touch $@

vllm-pairs: build-release $(VLLM_VENV)/.installed ## The noisy neighbour on vLLM: 25 minutes.
	$(BIN)/python -m tests.vllm.pairs --pairs 7 --null 2 --alone 7 --seconds 30 --out out/vllm

vllm-cost: build-release $(VLLM_VENV)/.installed ## The gate's cost in CPU of the API server.
	$(BIN)/python -m tests.vllm.cost --rounds 30 --out out/vllm/cost.json

$(VLLM_VENV)/.installed: tests/vllm/install.sh tests/vllm/make_model.py tests/vllm/sched_yield.c \
		clients/python/pyproject.toml clients/vllm/pyproject.toml
	PYTHON=$(PYTHON) tests/vllm/install.sh $(VLLM_VENV)
	touch $@

demo: build ## The noisy neighbour, without and with the scheduler, on the embedded emulator.
	$(BIN)/schedsvc demo --out out/demo

demo-failover: build ## The leader of two schedulers is killed under load; a minute.
	$(BIN)/schedsvc demo --failover --out out/demo-failover

demo-cluster: build ## Four schedulers share one fairness; their store is killed; a minute.
	$(BIN)/schedsvc demo --cluster --out out/demo-cluster

bench: build-release ## Admission latency at every rung, each beside its reference.
	$(BIN)/python -m bench --out out/bench

dist: dist/.built ## Build and check the packages in dist/: wheels and source distributions.

# What is in the packages, and what builds them; `wildcard` leaves out files that were deleted.
dist/.built: $(wildcard $(shell git ls-files _core schedsvc clients lab deploy setup.py \
		pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md)) | build
	$(BIN)/python deploy/release.py
	touch $@

test-dist: dist ## Install from dist/ into bare environments, and run what is there.
	@# Four at a time on any machine: each of them waits for its demo half of the time.
	$(call RUN,install,-n 4 --dist loadgroup,tests/install)

test-lab: dist ## The tests of lab/ against the packages of dist/, in a tree that holds no others.
	rm -rf $(LAB_TREE) && mkdir -p $(LAB_TREE)
	git ls-files -z ':!schedsvc' ':!lab' ':!clients' | xargs -0 cp --parents -t $(LAB_TREE)
	$(BIN)/python -m venv --without-pip $(LAB_TREE)/.venv
	$(BIN)/python -m pip --python $(LAB_TREE)/.venv install --quiet --no-deps --no-index \
		--ignore-installed --find-links dist schedsvc schedsvc-client schedsvc-vllm schedsvc-lab
	@# What these require lies in this environment; an editable package there is no module here.
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$(echo $(LAB_TREE)/.venv/lib/python*/site-packages)/required.pth
	cd $(LAB_TREE) && .venv/bin/python -m pytest -q -n $(TESTS_AT_ONCE) \
		-m 'not slow and not vllm and not alone' tests/lab

image: dist ## Build the container images from dist/, by docker, podman or buildah.
	$(BIN)/python -m deploy.image

test-chart: build $(CHART_VENV)/.installed ## Render the chart and Kustomize, and check the objects.
	$(BIN)/python -m pytest -q -m install tests/box/test_chart.py tests/box/test_chart_cluster.py \
		tests/box/test_kustomize.py tests/box/test_compose.py

$(CHART_VENV)/.installed: tests/box/requirements.txt
	$(PYTHON) -m venv $(CHART_VENV)
	$(CHART_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

test-image: dist ## Build the images on an empty Debian and run them: needs root and podman.
	$(call RUN,install,,tests/box/test_image.py tests/box/test_compose_run.py \
		tests/box/test_walk.py tests/box/test_first_hour.py)

clean: ## Remove what was built.
	rm -rf $(VENV) $(VLLM_VENV) $(CHART_VENV) $(INTEROP_VENV) $(FRONTS_VENV) \
		$(LITELLM_VENV)
	rm -rf build clients/*/build lab/build dist out deploy/man
	rm -rf schedsvc/*.so schedsvc/*/*.so lab/schedsvc_lab/*/*.so _core/*.c
	rm -rf clients/node/node_modules clients/node/dist
