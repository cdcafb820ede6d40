# jetspec-jax: `make demo` and `make test` set everything up themselves, in .venv, from a clean clone.
#   make demo          the bundled model and draft head, plain against speculative
#   make demo GPU=1    the same with the CUDA build of JAX
#   PYTHON=/path/to/python3.12 chooses the interpreter
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.9
SUITES ?= humaneval,gsm8k,mtbench
# Skipped by `make test`, which has no Triton: gpu-compile brings it.
TRITON_TESTS := $(addprefix tests/pallas_kernels/,test_build_tree_gpu.py test_projection_triton.py \
  test_tree_attention_triton.py test_gpu_apis.py)
# Mosaic kernels in Pallas' interpreter: the part of JAX that moves most.
PALLAS_TESTS := $(addprefix tests/pallas_kernels/,test_mosaic_api.py test_tree_attention_mosaic.py test_verify_head_gpu.py \
  test_row_invariant_matmul_gpu.py test_draft_head_topk_gpu.py test_gpu_dispatch.py)
# Compiling is most of the tests' time, and most of it runs on one core. A file stays in one process.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile
# Versions come from uv.lock. --inexact keeps what requirements/data.txt adds beside it.
SYNC := UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --frozen --inexact --quiet $(if $(GPU),--extra cuda)
# A stamp says what it installed: another choice of GPU=1 is another stamp.
KIND := $(if $(GPU),gpu,cpu)
RUN := $(VENV)/.installed-run-$(KIND)
DEV := $(VENV)/.installed-dev-$(KIND)
INPUTS := pyproject.toml uv.lock requirements/data.txt

.PHONY: help demo test test-fast asan train-smoke gpu-compile test-next lint format types check gpu-check bench bench-peers lock hooks install dev clean distclean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(RUN)  ## Real text, plain against speculative; last line of stdout is JSON (under 3 minutes)
	@$(BIN)/python -m serve.demo

test: $(DEV)  ## All tests, a process for each core (at most 4)
	@$(BIN)/python -m pytest $(PARALLEL)

test-fast: $(DEV)  ## Tests without the real model
	@$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

asan: $(DEV)  ## Kernel tests under AddressSanitizer and UBSan (needs GCC)
	@$(BIN)/python -m tests.pallas_kernels.asan

train-smoke: $(DEV)  ## Regenerate, train, export, evaluate and serve a tiny head (under 3 minutes)
	@$(BIN)/python -m train.smoke

gpu-compile: $(DEV)  ## Kernels compile for H100 and RTX PRO 6000, and training of Qwen3-8B for 8 x H100 (no GPU needed)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/gpu-compile -r requirements/gpu-compile.txt
	@export PYTHONPATH=$(VENV)/gpu-compile JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3; \
	  $(BIN)/python -m pytest -q -rN --durations 0 --durations-min 5 $(PARALLEL) $(TRITON_TESTS); \
	  $(BIN)/python -m pallas_kernels.gpu_compile --quick; \
	  $(BIN)/python -m train.gpu_compile --config configs/train/qwen3_8b.toml --geometry qwen3-8b

test-next: $(DEV)  ## Mosaic kernels on the next JAX (requirements/jax-next.txt), in the interpreter
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/jax-next -r requirements/jax-next.txt
	@PYTHONPATH=$(VENV)/jax-next $(BIN)/python -m pytest -q $(PALLAS_TESTS)

# No set-up: a GPU machine may have no network. PYTHON is one with JAX for CUDA.
gpu-check:  ## On a GPU: gpu tests, exactness, a run, the bench; results in gpu-check/ (PYTHON=... ARGS="--wheels DIR")
	@$(or $(PYTHON),python3) -m serve.gpu_check $(ARGS)

lint: $(DEV)  ## ruff: lint and format check
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(DEV)  ## ruff: fix and format
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

types: $(DEV)  ## pyright
	@$(BIN)/pyright

check: lint types test  ## lint, types and tests

bench: $(DEV)  ## README's benchmark table: make bench SUITES=humaneval ARGS="--limit 20"
	@$(BIN)/python -m serve.bench --suite $(SUITES) $(ARGS)

bench-peers: $(DEV)  ## Beside llama.cpp and transformers: LLAMA_PYTHON=/path/to/python TORCH_PYTHON=/path/to/python
	@$(BIN)/python -m serve.peers $(if $(LLAMA_PYTHON),--llama-python $(LLAMA_PYTHON)) \
	  $(if $(TORCH_PYTHON),--torch-python $(TORCH_PYTHON)) $(ARGS)

lock: $(DEV)  ## Resolve again after a change of pyproject.toml
	@$(BIN)/uv lock

hooks: $(DEV)  ## Install the pre-commit hooks (they use .venv, no network)
	@$(BIN)/pre-commit install

install: $(RUN)  ## Only set up .venv to run
dev: $(DEV)  ## Only set up .venv to develop

clean:  ## Remove build outputs and compiled programs; regenerated data and runs in .cache stay
	rm -rf .cache/test-compilations .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean  ## And .venv
	rm -rf $(VENV)

# --- set-up -------------------------------------------------------------------------------------------------

$(BIN)/uv:
	@python=$$(scripts/find_python) && echo "setting up $(VENV) with $$python" >&2 \
	  && "$$python" -m venv $(VENV) \
	  && $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(RUN): $(INPUTS) | $(BIN)/uv
	@$(SYNC) --extra autotune
	@$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python -r requirements/data.txt
	@touch $@

$(DEV): $(INPUTS) | $(BIN)/uv
	@$(SYNC) --extra dev
	@$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python -r requirements/data.txt
	@touch $@ $(RUN)
