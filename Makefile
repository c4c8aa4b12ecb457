PYTHON ?= python3
SEED ?= 0
GPU_PYTHON ?= 3.12
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
VLLM_VENV := .venv-vllm
VLLM_ROWS ?= slow or not slow
FILE ?= grpo_recipes/runs/resume.py
TESTS ?= tests/grpo_recipes/runs
DEBIAN ?= trixie
TORCH ?= 2.15.0
# Files with tests marked `gpu`. Others import packages that a GPU machine may lack.
GPU_TESTS := tests/grpo_recipes/generation tests/grpo_recipes/training

# Tests and commands start many processes, and each would compile all modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install quickstart tutorial test golden test-slow test-nightly test-vllm torture models mutants notebook lint docs bench \
	real-model gpu-bundle dist test-oldest test-torch test-debian next-trl clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'

install: $(INSTALLED)  ## the virtual environment in .venv, with the exact versions of constraints.txt

$(RUNTIME): pyproject.toml rewards/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ./rewards --editable .
	touch $@

$(INSTALLED): $(RUNTIME)
	$(PIP) --editable ./rewards --editable '.[dev]'
	touch $@

quickstart: $(RUNTIME)  ## warm-start a tiny model, train it with GRPO, print accuracy before and after (SEED=0)
	$(BIN)/python -m grpo_recipes.quickstart --seed $(SEED)

test: $(INSTALLED)  ## the quick part of the test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

golden: $(INSTALLED)  ## rewrite tests/golden, what each command prints: read the diff
	GOLDEN=write $(BIN)/python -m pytest -n 2 tests/repo/test_golden.py

test-slow: $(INSTALLED)  ## launches on two processes, full grids, installs: minutes
	GRPO_TEST_DEVICE=pretend $(BIN)/python -m pytest -n 2 --dist worksteal -m "gpu and not slow" $(GPU_TESTS)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not nightly"

test-nightly: $(INSTALLED)  ## the largest grids and fuzzing, the tutorial: tens of minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m nightly

test-vllm: $(VLLM_VENV)/.installed  ## training and evaluation against vLLM itself, on a CPU; two rows: VLLM_ROWS="not slow"
	@cat $(VLLM_VENV)/unavailable 2>/dev/null || $(VLLM_VENV)/bin/python -m pytest tests/vllm -m "$(VLLM_ROWS)"

$(VLLM_VENV)/.installed: pyproject.toml rewards/pyproject.toml constraints.txt tests/vllm/install.sh tests/vllm/requirements.txt
	PYTHON=$(PYTHON) tests/vllm/install.sh $(VLLM_VENV)
	touch $@

torture: $(INSTALLED)  ## kill training 60 times at files of a save, 20 at random moments; resume, compare (SEED=0)
	$(BIN)/python -m tests.tools.torture --kills 60 --random-kills 20 --seed $(SEED) --record benchmarks/results/torture.md

mutants: $(INSTALLED)  ## single changes of FILE that the quick tests of TESTS do not notice
	$(PIP) cosmic-ray==8.7.0
	mkdir -p build && rm -f build/mutants.sqlite
	sed 's#FILE#$(FILE)#; s#TESTS#$(TESTS)#' tests/tools/mutants.toml > build/mutants.toml
	$(BIN)/cosmic-ray init build/mutants.toml build/mutants.sqlite
	$(BIN)/cr-filter-operators build/mutants.sqlite build/mutants.toml
	$(BIN)/cosmic-ray exec build/mutants.toml build/mutants.sqlite
	$(BIN)/cr-report --surviving-only --show-diff build/mutants.sqlite

models: $(INSTALLED)  ## every causal language model of transformers and adapter of PEFT, tiny: layout and gradient against TRL's
	$(BIN)/python -m tests.tools.models --record docs/model-layouts.md
	$(BIN)/python -m tests.tools.adapters --record docs/adapter-layouts.md

tutorial: $(INSTALLED)  ## the quickstart, evaluated, diagnosed and reported; makes the picture of docs/tutorial.md
	$(BIN)/python -m docs.tutorial

notebook: $(INSTALLED)  ## the outputs of notebooks/one_gpu.ipynb, on a CPU with a tiny model
	$(BIN)/python -m tests.tools.notebook

lint: $(INSTALLED)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)  ## the documentation as a site in build/site, which opens from the file system: build/site/index.html
	$(BIN)/python docs/build_site.py

bench: $(INSTALLED)  ## every benchmark that runs on a CPU, each printing a table of ratios
	for file in $(filter-out benchmarks/gold%.py benchmarks/gpu%.py benchmarks/real_model%.py benchmarks/unshared.py benchmarks/workloads.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$file || exit 1; done

real-model: $(INSTALLED)  ## a pretrained model of 135M parameters, trained by TRL and by ours, and with a tool: hours on two cores, resumable
	$(PIP) gguf
	$(BIN)/python benchmarks/real_model.py
	$(BIN)/python benchmarks/real_model.py --record
	$(BIN)/python benchmarks/real_model_coupled.py --steps 10
	$(BIN)/python benchmarks/real_model_coupled.py --record
	$(BIN)/python benchmarks/real_model_tools.py
	$(BIN)/python benchmarks/real_model_tools.py --record

# What a GPU machine with torch, accelerate, pandas, pyarrow and pytest may lack beside the two packages, or have too old.
GPU_PACKAGES := trl transformers peft datasets dill multiprocess xxhash fsspec filelock psutil math-verify latex2sympy2_extended \
	antlr4-python3-runtime rich markdown-it-py mdurl pygments pytest-timeout hypothesis sortedcontainers
gpu-bundle: $(INSTALLED)  ## wheels for a GPU machine without a network, in dist/gpu (GPU_PYTHON=3.12): docs/gpu.md
	rm -rf dist/gpu
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist/gpu ./rewards .
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --constraint constraints.txt \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --dest dist/gpu $(GPU_PACKAGES)
	@du -sh dist/gpu
	@echo 'there, in this folder: docs/gpu.md, "On a machine with a GPU"'

dist:  ## both packages as wheels and source archives in dist, checked by twine
	rm -rf dist/*.whl dist/*.tar.gz
	$(PYTHON) -m venv build/dist-env
	build/dist-env/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build twine
	build/dist-env/bin/python -m build --outdir dist rewards
	build/dist-env/bin/python -m build --outdir dist .
	build/dist-env/bin/python -m twine check --strict dist/*.whl dist/*.tar.gz

# Environments of their own, beside .venv. uv resolves, since pip knows no lowest versions.
test-oldest: dist  ## the quick tests on the oldest versions of what both packages need
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check uv
	build/oldest/bin/uv pip compile --quiet --resolution lowest-direct --find-links dist --output-file build/oldest.txt \
		--python build/oldest/bin/python pyproject.toml rewards/pyproject.toml
	build/oldest/bin/uv pip install --quiet --python build/oldest/bin/python --constraint build/oldest.txt \
		--editable ./rewards --editable '.[dev]'
	build/oldest/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

test-torch:  ## the quick tests of training and decoding on another torch than that of constraints.txt (TORCH=2.15.0)
	$(PYTHON) -m venv build/torch
	grep -v '^torch==' constraints.txt > build/torch/constraints.txt
	build/torch/bin/python -m pip install --quiet --disable-pip-version-check --constraint build/torch/constraints.txt \
		--editable ./rewards --editable '.[dev]' torch==$(TORCH)
	build/torch/bin/python -m pytest -n 2 --dist worksteal -m "not slow" tests/grpo_recipes/training tests/grpo_recipes/generation \
		tests/mathematics

test-debian:  ## the quick tests on the Python of Debian's trixie, 3.13, as root: debootstrap in build (DEBIAN=sid: 3.14)
	tests/tools/debian.sh $(DEBIAN) build/$(DEBIAN)

# The range in pyproject.toml ends before the next minor version, so the packages themselves are put beside it without it.
next-trl:  ## the tests of the seams, on the newest trl and transformers that the index has, pre-releases included
	$(PYTHON) -m venv build/next
	build/next/bin/python -m pip install --quiet --disable-pip-version-check --editable ./rewards --editable '.[dev]'
	build/next/bin/python -m pip install --quiet --disable-pip-version-check --pre --upgrade trl transformers
	build/next/bin/python -m pip list --format=freeze | grep -E '^(trl|transformers|torch|accelerate|peft)=='
	build/next/bin/python -m pytest -n 2 --dist worksteal -m "not slow" tests/grpo_recipes/training tests/mathematics

clean:  ## remove the virtual environment and caches (not runs/)
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
