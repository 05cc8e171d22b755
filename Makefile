# Two commands do everything on a fresh machine: `make demo` and `make test`. Python 3.11 or newer, no root.
PYTHON ?= python3
BIN := .venv/bin
# Two processes; where servers are started, the tests that join the stack share one of them (tests/conftest.py).
SIDE_BY_SIDE := -n 2 --dist loadscope --no-loadscope-reorder
BY_FILE := -n 2 --dist loadfile
# Threads of both would wait for each other at every barrier.
test test-stack test-slow test-portable: export OMP_NUM_THREADS := 1
# The tests that compute with networks; what else there is has no kernels to choose.
COMPUTES := $(addprefix tests/vit/,test_published.py test_train.py test_run.py test_inspection.py models vtab)
test-portable: export ONEDNN_MAX_CPU_ISA := AVX2
test-portable: export ATEN_CPU_CAPABILITY := avx2

.PHONY: demo up down install test test-stack test-slow test-portable lint clean

demo: install  ## the main job on real images: prepare, pre-train, fine-tune, evaluate, compare
	@$(BIN)/vitline demo

up: install  ## the servers: S3 store, MLflow, Prefect with a worker, Ray; prints their pages
	@$(BIN)/vitline stack up

down:  ## ends them all; what was stored stays
	@test ! -x $(BIN)/vitline || $(BIN)/vitline stack down

install:  ## .venv with what the product and the demo need
	@$(PYTHON) infra/local/install.py local

test:  ## the fast tests, which need no server
	@$(PYTHON) infra/local/install.py dev
	@$(BIN)/python -m pytest $(BY_FILE) -m "not slow and not servers"

test-stack:  ## what joins the local stack or starts servers of its own
	@$(PYTHON) infra/local/install.py dev
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "servers and not slow"

test-slow:  ## real clusters, kills and what takes long
	@$(PYTHON) infra/local/install.py dev
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m slow --timeout 900 --durations 25

test-portable:  ## what computes, as on another processor: kernels without AVX-512, products rounded otherwise
	@$(PYTHON) infra/local/install.py dev
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --other-rounding -k "not on_ray" $(COMPUTES)

lint:  ## style and types
	@$(PYTHON) infra/local/install.py dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean: down  ## everything that was made here: environment, store, logs
	rm -rf .venv .vitline
