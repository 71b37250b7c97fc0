# Two commands do all the set-up: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?=
VENV := .venv
EXAMPLES ?= 100000
SEEDS ?= 5000
SECONDS ?= 3600
RDMA_VM ?= ../shared/tools/rdma-vm
RUN := $(VENV)/bin/python
export PYTHONUNBUFFERED := 1
export HF_HUB_OFFLINE := 1

.PHONY: help setup setup-fabrics setup-gpu setup-sglang bench-gpu bench-gpu2 demo test test-all test-rdma test-mori check check-faults soak lint format typecheck bench golden clean

help:
	@echo "make demo      real models through prefill, decode and router processes, compared with a single process"
	@echo "               (ALL=1 every architecture; TRANSPORT=tcp, nixl or mooncake another transport, auto the best;"
	@echo "               DEVICE=cuda on a GPU)"
	@echo "make test      the tests that CI runs"
	@echo "make test-all  all tests, the long ones too, make check and make check-faults"
	@echo "make test-mori the mori fabric against MORI-IO itself, on AMD hardware (PYTHON=one that has amd-mori)"
	@echo "               or in a bed without it (MORI_BED=folder)"
	@echo "make check     100,000 random pairs of layouts against the oracle (EXAMPLES=n, SEED=s; a fresh seed by default)"
	@echo "make soak      ranks, then servers, as processes at full load with a random fault each second, for an hour each"
	@echo "               (SECONDS=n, SEED=s)"
	@echo "make check-faults   5,000 simulated worlds with seeded faults, and 200 larger ones (SEEDS=n, FIRST=s)"
	@echo "make test-rdma the tests of RDMA, in a virtual machine with soft-RoCE (RDMA_VM=folder of the tool that makes it)"
	@echo "make lint      ruff (lint, format) and mypy strict"
	@echo "make bench     benchmarks beside NIXL and Mooncake; figures in build/bench/*.json"
	@echo "               (QUICK=1 a short one; SGLANG=folder of a harness for SGLang's own managers)"
	@echo "make setup     the virtual environment in .venv (done by the others when it is needed)"
	@echo "make setup-fabrics   NIXL and Mooncake in .venv too: their transports, and the tests of them"
	@echo "make setup-gpu Triton in .venv too: copies on a GPU, and their tests in its interpreter, which need no GPU"
	@echo "make bench-gpu copies on a GPU beside NIXL's and CUDA's; make bench-gpu2 between two of one host (QUICK=1)"
	@echo "make setup-sglang    SGLang on the CPU in build/sglang: the tests of the back-end for it"
	@echo "make clean     removes everything that was made here"

setup:
	@PYTHON="$(PYTHON)" bash scripts/setup.sh

setup-fabrics: setup
	@bash scripts/fabrics.sh

setup-gpu: setup
	@bash scripts/gpu.sh

setup-sglang: setup
	@bash scripts/sglang.sh

demo: setup
	@$(RUN) -m kvbaton demo $(if $(ALL),--all) $(if $(TRANSPORT),--transport $(TRANSPORT)) \
		$(if $(DEVICE),--device $(DEVICE)) --json build/demo.json

test: setup
	@$(RUN) -m pytest -q -m "not long"

test-all: setup
	@$(RUN) -m pytest -q
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory check-faults

test-rdma: setup-fabrics
	@RDMA_VM="$(RDMA_VM)" VENV="$(VENV)" bash scripts/test-rdma.sh

test-mori:
	@MORI_BED="$(MORI_BED)" PYTHON="$(PYTHON)" bash scripts/test-mori.sh

check: setup
	@$(RUN) -m kvbaton check layouts --examples $(EXAMPLES) --processes 2 $(if $(SEED),--seed $(SEED)) --json build/check.json
	@$(RUN) -m kvbaton check search --json build/search.json

check-faults: setup
	@$(RUN) -m kvbaton check faults --seeds $(SEEDS) --processes 2 $(if $(FIRST),--first $(FIRST)) --json build/faults.json
	@$(RUN) -m kvbaton check faults --seeds 200 --size 5 --processes 2 $(if $(FIRST),--first $(FIRST)) --json build/faults-large.json

soak: setup
	@$(RUN) -m kvbaton check soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) --json build/soak.json
	@$(RUN) -m kvbaton check soak --serve --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) --json build/soak-serve.json

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

format: setup
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

# QUICK=1: seconds instead of minutes, for a look. SGLANG=folder: a harness that drives SGLang's own managers.
BENCH := $(RUN) -m kvbaton bench
bench: setup
	@bash scripts/contenders.sh $(if $(SGLANG),--sglang)
	@$(BENCH) plan $(if $(QUICK),--pieces 100000 --runs 3)
	@$(BENCH) copy $(if $(QUICK),--megabytes 32 --runs 3)
	@$(BENCH) transfer $(if $(QUICK),--megabytes 32 --runs 3)
	@$(BENCH) latency $(if $(QUICK),--rooms 200)
	@$(BENCH) slices $(if $(QUICK),--megabytes 64 --runs 3)
	@$(BENCH) rooms $(if $(QUICK),--megabytes 64 --runs 3 --flat 2000)
	@$(BENCH) handover $(if $(SGLANG),--sglang $(SGLANG)) $(if $(QUICK),--runs 3 --cases a)
	@$(BENCH) fabrics $(if $(QUICK),--megabytes 16 --runs 3)
	@$(BENCH) digest $(if $(QUICK),--megabytes 32 --runs 3)
	@$(BENCH) plot
	@$(BENCH) summary

# PYTHON_GPU=one that has torch for CUDA, Triton, and perhaps NIXL, where .venv has not.
BENCH_GPU := PYTHONPATH=src $(if $(PYTHON_GPU),$(PYTHON_GPU),$(RUN)) -m kvbaton bench gpu
bench-gpu: $(if $(PYTHON_GPU),,setup-gpu)
	@$(BENCH_GPU) --against nixl $(if $(QUICK),--megabytes 64 --runs 3) --json build/bench/gpu.json

bench-gpu2: $(if $(PYTHON_GPU),,setup-gpu)
	@$(BENCH_GPU) --against nixl --devices 0,1 $(if $(QUICK),--megabytes 64 --runs 3) --json build/bench/gpu2.json

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info src/kvbaton/copy/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
