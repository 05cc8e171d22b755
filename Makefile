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
QUEUES := stack servers slow stack-long servers-long long
test test-portable $(QUEUES): export OMP_NUM_THREADS := 1
# The tests that compute with networks; what else there is has no kernels to choose.
COMPUTES := $(addprefix tests/vit/,test_published.py test_run.py convert pages models training vtab)
test-portable: export ONEDNN_MAX_CPU_ISA := AVX2
test-portable: export ATEN_CPU_CAPABILITY := avx2

.PHONY: $(QUEUES) smoke-demo
.PHONY: demo up down install test test-stack test-slow test-rest test-long test-portable lint docs lock licences clean

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

# Tests that share one stack run in one process, one after the other. Two processes at a time, the longest first: they keep two
# cores busy, and a third one only makes each slower.
BESIDE := @$(MAKE) -j2 --keep-going --no-print-directory
test-stack:  ## the tests that use the local stack or start servers of their own
	@$(INSTALL) dev
	$(BESIDE) stack servers

test-slow:  ## what takes seconds without servers: kills, whole preparations, exports, migrations of databases
	@$(INSTALL) dev
	$(BESIDE) slow

test-rest:  ## both
	@$(INSTALL) dev
	$(BESIDE) stack slow servers $(ALSO)

test-long:  ## what takes tens of seconds: kills in whole flows, suspends, fuzzing, faults under Ray and under servers
	@$(INSTALL) dev
	$(BESIDE) stack-long servers-long long

stack: CHOSEN := stack and not long
servers: CHOSEN := servers and not stack and not long
slow: CHOSEN := slow and not stack and not servers and not long
stack-long: CHOSEN := stack and long
servers-long: CHOSEN := servers and long and not stack
long: CHOSEN := long and not stack and not servers
$(QUEUES):
	@mkdir -p build && set -o pipefail && $(PYTEST) -m "$(CHOSEN)" --timeout 900 --durations 15 2>&1 | tee build/$@.log

# With ALSO=smoke-demo, `make test-rest` runs it beside the tests. It uses, and ends, the stack of this folder.
smoke-demo:
	@mkdir -p build && set -o pipefail && .ci/smoke-demo 2>&1 | tee build/$@.log

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
