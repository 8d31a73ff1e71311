# Everything a fresh machine needs is set up by `make env`, which the other targets run first and
# which does nothing until one of its inputs changes. Python 3.11, pip and make are all it takes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.env.stamp
TESTS ?= srt/mem_cache/test_swa_*.py

# Test files run beside each other, one process a core; each test process computes with one thread.
WORKERS ?= 2

# Two cores are shared by a server and its client: one compute thread each is fastest, and always
# gives the same sums.
export OMP_NUM_THREADS ?= 1

.PHONY: help env lint test regression intree-check matrix soak compare demo dist bench-reuse bench-l3 bench-gpu clean

help:
	@echo "make demo   start the server per arm, send the rounds, print the table, write a report to look at"
	@echo "make test   lint, then the tests (LONG=1: those of every layout, schedule and tier too)"
	@echo "make regression    with the flag off SGLang is as without the plugin (QUICK: REGRESSION_ARGS=--quick)"
	@echo "make intree-check  the feature built into a tree of SGLang: its tests and the demo there (ALL=1: every test)"
	@echo "make matrix        every layout, speculation and number of ranks, tier by tier (under an hour)"
	@echo "make soak MINUTES=2 everything at once on a server, every answer checked (KILLS=10: and killed)"
	@echo "make compare       off against dev with SGLang's own clients, docs/compare.md (10 minutes)"
	@echo "make bench-l3      what storage costs, and its fault tests, counted"
	@echo "make bench-reuse   replay request traces without a model, write docs/reuse.md (6 minutes)"
	@echo "make bench-gpu     what capture and restore cost on a GPU, and whether they are exact there"
	@echo "make dist   the wheel and the source distribution, into dist/"
	@echo "make env    only the set-up; make lint: only ruff and mypy; make clean: remove $(VENV)"

env: $(STAMP)

# Empty where no Python 3 is on the PATH at all.
$(if $(PYTHON),,$(error this needs Python 3.11, and none was found: set PYTHON=/path/to/python3.11))

$(STAMP): requirements/cpu.txt requirements/dev.txt requirements/nixl.txt pyproject.toml test/reference_platform/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(0 if v[:2] == (3, 11) else "this needs Python 3.11 (found %d.%d): set PYTHON=/path/to/python3.11" % v[:2])'
	@echo "setting up $(VENV) (about 3 GB, a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/python -m pip install -q --no-deps sglang==0.5.23
	$(BIN)/python -m pip install -q --no-deps -r requirements/nixl.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e . -e test/reference_platform
	@touch $(STAMP)

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	cd test && ../$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(if $(LONG),-m "") $(TESTS)

# Keep transcripts and logs: REGRESSION_ARGS="--keep DIR".
regression: env
	cd test/srt/mem_cache && ../../../$(BIN)/python -W ignore regression.py $(REGRESSION_ARGS)

# Python finds the tree's SGLang there, and cannot import the plugin (docs/upstreaming.md).
intree-check: env
	cd test/srt/mem_cache && ../../../$(BIN)/python -W ignore intree_check.py --workers $(WORKERS) $(if $(ALL),--all)

# What the log files of a wrong cell say: MATRIX_ARGS="--logs DIR".
matrix: env
	cd test/srt/mem_cache && ../../../$(BIN)/python -W ignore matrix.py $(MATRIX_ARGS)

# KILLS=10: servers on the same storage that are killed first; SEED=…
MINUTES ?= 30
KILLS ?= 0
SEED ?= 1

soak: env
	cd benchmark && ../$(BIN)/python -W ignore -m soak --minutes $(MINUTES) --kills $(KILLS) --seed $(SEED) $(SOAK_ARGS)

dist: env
	$(BIN)/python -W ignore -c "import setuptools.build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"

demo: env
	$(BIN)/python benchmark/demo.py

# Another Python than $(VENV)'s is expected to have SGLang as it is; nothing is set up then.
COMPARE_PYTHON ?= $(BIN)/python
COMPARE_STAMP := $(VENV)/.compare.stamp

$(COMPARE_STAMP): $(STAMP) requirements/compare.txt
	$(BIN)/python -m pip install -q -r requirements/compare.txt
	@touch $(COMPARE_STAMP)

compare: $(if $(filter $(BIN)/python,$(COMPARE_PYTHON)),$(COMPARE_STAMP))
	$(COMPARE_PYTHON) benchmark/compare_arms.py $(COMPARE_ARGS)

bench-reuse: env
	cd benchmark && ../$(BIN)/python -W ignore -m reuse

bench-l3: env
	cd benchmark && ../$(BIN)/python -W ignore -m l3

# The Python that has SGLang and the GPU's torch: $(VENV)'s where that was made, else the machine's.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(abspath $(BIN)/python),python3)

bench-gpu:
	@cd benchmark && PYTHONPATH=../python:$$PYTHONPATH $(GPU_PYTHON) -W ignore -m gpu $(GPU_ARGS)

clean:
	rm -rf $(VENV)
