# Two commands on a machine with Python >= 3.11, make and a C++ compiler: `make demo` and `make test`. Both build .venv first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := .venv-oldest
CLIENTS := .venv-clients
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# One process per core with one thread each: threads of several processes on the same cores wait for each other.
# A test that hangs says where; the longest takes 250 s on two idle cores. Not in pyproject.toml: there it would replace the limits of tests/gpu.
SPREAD := --numprocesses=auto --dist=loadfile -o faulthandler_timeout=900
PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) $(SPREAD)
# The tiers by their markers: `test` is the selection of pyproject.toml.
KERNELS := 'kernels and not full and not gpu and not browser and not clients'
BOTH := 'not full and not gpu and not browser and not clients'

.PHONY: help demo demo-small test test-kernels test-full test-browser test-clients test-oldest fuzz soak soak-server lint format snapshots features gpu-check rehearse-gpu acceptance train-demo bench same-bits compare guard wheel clean race docs

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# torch goes first and alone: whichever build of it pip is set up to find (CPU or CUDA) is then kept by everything after it.
$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "graphspec needs Python >= 3.11, found " + sys.version + "; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

MODEL ?= smollm2
demo: $(STAMP) ## a real model answers; what was drafted; speeds with and without speculation. Fetches it (93 MB) where there is a network
	if $(BIN)/graphspec fetch $(MODEL) > /dev/null; then $(BIN)/graphspec demo; else $(BIN)/graphspec demo experiment=demo_chain; fi

demo-small: $(STAMP) ## the same in brief with a code model that comes with the package
	$(BIN)/graphspec demo experiment=demo_chain

# Tests of the real model skip themselves where it can't be fetched.
test: $(STAMP) ## what protects most, in minutes; fetches the real model (93 MB) once
	$(BIN)/graphspec fetch $(MODEL) > /dev/null || true
	$(PARALLEL)

test-kernels: $(STAMP) ## fused kernels interpreted and compiled ahead of time, Inductor's code
	$(PARALLEL) -m $(KERNELS)

test-full: $(STAMP) ## every test that needs no GPU, also the thorough ones
	$(PARALLEL) -m 'not gpu and not browser and not clients'

test-browser: $(STAMP) ## the report in a real browser; needs Chromium
	$(PYTEST) -m browser tests/browser

# Their versions are the newest. They see torch, transformers and graphspec of .venv; nothing of theirs gets into it.
test-clients: $(STAMP) ## OpenAI's client, lm-eval, guidellm and aiperf against graphspec serve, and replicas on Ray Serve, installed into .venv-clients
	$(PYTHON) -m venv $(CLIENTS)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > "$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install openai 'lm-eval[api]' guidellm aiperf 'ray[serve]>=2.60'
	$(PYTEST) -m clients tests/clients --clients=$(CLIENTS)/bin

FUZZ_SEED ?= 0
FUZZ_BUDGET ?= 1000
FUZZ_SECONDS ?= 300
fuzz: $(STAMP) ## inputs of every kind at command line, Python API, checkpoints and a server; FUZZ_SEED=0 FUZZ_BUDGET=1000 each, FUZZ_SECONDS=300 for a server
	$(PARALLEL) tests/fuzz --fuzz-seed=$(FUZZ_SEED) --fuzz-budget=$(FUZZ_BUDGET) --fuzz-seconds=$(FUZZ_SECONDS)

SOAK_REQUESTS ?= 100000
soak: $(STAMP) ## many requests over one engine, with aborts, errors and short pages; SOAK_REQUESTS=100000 of each kind
	$(PYTEST) tests/engine/test_soak.py --soak-requests=$(SOAK_REQUESTS)

SOAK_MINUTES ?= 30
soak-server: $(STAMP) ## hostile and honest clients at one server; SOAK_MINUTES=30
	$(BIN)/python -m perf.serve_soak --minutes $(SOAK_MINUTES)

# torch 2.11 refuses the setuptools that is pinned for the others.
test-oldest: ## `test` and `test-kernels` under the oldest torch that is supported, in .venv-oldest
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install torch==2.11.0
	grep -vE '^(torch|setuptools)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install -c $(OLDEST)/constraints.txt -e '.[dev]'
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(SPREAD) -m $(BOTH)

lint: $(STAMP) ## ruff, mypy, the layer law
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

snapshots: $(STAMP) ## write tests/snapshots anew from conf/experiment
	$(BIN)/python -m tests.snapshots

features: $(STAMP) ## write docs/features.md from the tests that say what they show
	$(PARALLEL) -m '(covers or of_family) and not gpu and not browser and not clients' --write-features

CALL ?= first
OUT ?= gpu-results
# Not $(STAMP): a GPU machine may have no network to make .venv from, and has its own torch. Where there is a .venv it is used.
gpu-check: ## all that needs a GPU, in calls of ten minutes (perf/gpu/RUNBOOK.md); CALL=first, second or third, OUT=folder of the results
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m perf.gpu_check --call $(CALL) --out $(OUT)

# Needs a Python 3.12 and about 7 GB of disk: the torch of a GPU machine, and what it needs.
REPLICA ?= python3.12
rehearse-gpu: $(STAMP) ## the first call on a GPU, rehearsed without one, with the packages of such a machine alone, in .venv-gpu-replica
	$(BIN)/python -m perf.gpu.rehearse --python $(REPLICA)

bench: $(STAMP) ## measure speed, all sides in one run; docs/benchmarks.md
	$(BIN)/python -m perf.speed --page

SAME ?=
same-bits: $(STAMP) ## a real model's tokens and logits with every drafter against plain decoding, bit for bit: hours; SAME="--prompts 20 --max-tokens 24"
	$(BIN)/python -m perf.same_bits $(SAME)

RACE ?=
# The demo model's race also has ONNX Runtime, CTranslate2 and OpenVINO: `pip install -e '.[race]'`.
race: $(STAMP) ## a chat model against llama.cpp and transformers; MODEL=demo: the demo model against other engines; RACE="--llama PROGRAM"
	$(BIN)/python -m $(if $(filter demo,$(MODEL)),perf.speed --race,perf.chat_race --model $(MODEL)) $(RACE)

BASE ?= HEAD
HEAD ?= .
compare: $(STAMP) ## time two revisions side by side; BASE=HEAD and HEAD=. (the working tree) by default
	$(BIN)/python -m perf.compare $(BASE) $(HEAD)

guard: $(STAMP) ## count anew what tests/perf/test_guard.py compares with
	$(BIN)/python -m perf.counts --write

acceptance: $(STAMP) ## measure acceptance of every demo draft; docs/benchmarks.md
	$(BIN)/python -m perf.acceptance --page

TRAIN ?=
train-demo: $(STAMP) ## train the demo checkpoints anew; interrupted, it goes on; TRAIN="--out outputs/demo"
	$(BIN)/python -m recipes.train_demo $(TRAIN)

# mkdocs has an extra of its own: neither running nor testing needs it.
docs: $(STAMP) ## build the documentation into site/; a link that leads nowhere is an error
	$(PIP) install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

wheel: $(STAMP) ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## remove what the other targets made
	rm -rf $(VENV) $(OLDEST) $(CLIENTS) .venv-gpu-replica site dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
