# Two commands do everything on a fresh machine: `make demo` and `make test`. Python 3.11 or newer, no root.
PYTHON ?= python3
# `make HASHES=no ...` installs packages by version alone, without comparing their files with requirements.lock.
HASHES ?= yes
INSTALL = $(PYTHON) infra/local/install.py --hashes=$(HASHES)
SHELL := bash
BIN := .venv/bin
# Compiled modules are kept, whatever the caller's shell says: each of the many processes of a stack would compile them again.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest
# Two processes. Threads of both would wait for each other at every barrier.
BY_FILE := -n 2 --dist loadfile
test test-stack test-slow test-rest test-portable test-chaos stack-fast stack-slow servers-fast servers-slow slow chaos: export OMP_NUM_THREADS := 1
# The tests that compute with networks; what else there is has no kernels to choose.
COMPUTES := $(addprefix tests/vit/,test_published.py test_run.py convert inspection models training vtab)
test-portable: export ONEDNN_MAX_CPU_ISA := AVX2
test-portable: export ATEN_CPU_CAPABILITY := avx2

.PHONY: stack-fast stack-slow servers-fast servers-slow slow chaos smoke-demo
.PHONY: demo up down install test test-stack test-slow test-rest test-portable test-chaos lint docs lock licences clean

demo: install  ## the main job on real images: prepare, pre-train, fine-tune, evaluate, compare
	@$(BIN)/vitline demo

up: install  ## the servers: S3 store, MLflow, Prefect with a worker, Ray; prints their pages
	@$(BIN)/vitline stack up

down:  ## ends them all; what was stored stays
	@test ! -x $(BIN)/vitline || $(BIN)/vitline stack down

EXTRA ?= local
install:  ## .venv with what the product and the demo need, each file compared with its sha256 (HASHES=no: by version alone)
	@$(INSTALL) $(EXTRA)

test:  ## the fast tests: none needs a server or takes seconds
	@$(INSTALL) dev
	@$(PYTEST) $(BY_FILE) -m "not slow and not stack and not servers"

# Tests that share one stack run in one process, one after the other. What kills servers has a stack to itself: other tests
# check that servers are up and that no log repeats an error. Two processes at a time, the longest first: they keep two cores busy,
# and a third one only makes each slower.
BESIDE := @$(MAKE) -j2 --keep-going --no-print-directory
test-stack:  ## the tests that use the local stack or start servers of their own
	@$(INSTALL) dev
	$(BESIDE) stack-fast servers-fast

test-slow:  ## what takes seconds: kills, whole preparations, exports, migrations of databases, long fuzzing
	@$(INSTALL) dev
	$(BESIDE) stack-slow servers-slow slow

test-rest:  ## both: all that `make test` leaves out
	@$(INSTALL) dev
	$(BESIDE) stack-slow slow servers-slow stack-fast $(ALSO) servers-fast

stack-fast: CHOSEN := stack and not slow
stack-slow: CHOSEN := stack and slow
servers-fast: CHOSEN := servers and not stack and not slow
servers-slow: CHOSEN := servers and slow and not stack and not repeats
slow: CHOSEN := slow and not stack and not servers and not repeats
chaos: CHOSEN := repeats
stack-fast stack-slow servers-fast servers-slow slow chaos:
	@mkdir -p build && set -o pipefail && $(PYTEST) -m "$(CHOSEN)" --timeout 900 --durations 15 2>&1 | tee build/$@.log

# With ALSO=smoke-demo, `make test-rest` runs it beside the tests. It uses, and ends, the stack of this folder.
smoke-demo:
	@mkdir -p build && set -o pipefail && .ci/smoke-demo 2>&1 | tee build/$@.log

test-chaos:  ## scenarios of `vitline ops chaos` whose promise a test of a whole flow keeps as well
	@$(INSTALL) dev
	@$(MAKE) --no-print-directory chaos

test-portable:  ## what computes, as on another processor: kernels without AVX-512, products rounded otherwise
	@$(INSTALL) dev
	@$(PYTEST) $(BY_FILE) --other-rounding -m "not slow and not stack and not servers" $(COMPUTES)

lint:  ## style and types
	@$(INSTALL) dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: export NO_MKDOCS_2_WARNING := 1
docs:  ## the documentation as a site, in build/site; a broken link is an error
	@$(INSTALL) dev
	@$(BIN)/mkdocs build --strict

lock:  ## requirements.lock, after a change of pyproject.toml; UPGRADE=--upgrade, or "--upgrade-package NAME", for newer versions
	@$(INSTALL) dev
	@$(BIN)/python -m docs.generate.lock $(UPGRADE)

licences:  ## docs/licences.md, from what the installed packages say of themselves
	@$(INSTALL) dev
	@$(BIN)/python -m docs.generate.licences

clean: down  ## everything that was made here: environment, store, logs
	rm -rf .venv .vitline
