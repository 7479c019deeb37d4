# The project's commands; `make help` lists them. Each one makes what it needs: on a machine with
# Python 3.11 and make, `make test` works with nothing done before.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_BENCH := $(VENV)/.installed-bench
INSTALLED_FUZZ := $(VENV)/.installed-fuzz
INSTALLED_DOCS := $(VENV)/.installed-docs

# The interpreter that .venv is made with. Each candidate is run, not only looked for: a name on the
# PATH may be a shim with nothing behind it.
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p $(NEW_ENOUGH) >/dev/null 2>&1 && { echo $$p; break; }; done)

# What the tools look at: those of these folders that are there.
SOURCES := $(wildcard upr_kernel upr_protocol upr_server tests benchmarks deploy docs)
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# flake8-async is slow: it is given those files alone in which it could find something, no tests
# (ruff's rules for async code hold there), and not told to look for what is asyncio's (ASYNC3).
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

# More for one run of pytest: make test ARGS="-k chunk -x"
ARGS ?=
# Processes that run the tests, each a file at a time: two more than the two cores of a usual machine, as
# many tests wait for servers and for Spark; 0 for none beside pytest's own: make test WORKERS=0 ARGS="-s -k flips"
WORKERS ?= 4
# One row of the benchmarks: make bench ROW=B1
ROW ?=
# Lines broken by a mutation run, drawn from a module or a folder of them:
# make mutants MODULE=upr_protocol/failover.py SAMPLE=20
MODULE ?=
SAMPLE ?= 0
# Simulated clusters: make simulate SEEDS=2000 FIRST=500; one with its story: make simulate SEED=123;
# of one situation: make simulate PROFILE=diverged; with a bug put in, in the situation that it needs:
# make simulate BUG=collapse_under_cursor
SEEDS ?= 500
FIRST ?= 0
SEED ?=
PROFILE ?=
BUG ?=
SIMULATED = $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FIRST) $(if $(BUG),--until-found)) \
	$(if $(PROFILE),--profile $(PROFILE)) $(if $(BUG),--bug $(BUG))
# Seconds for each target of the fuzzer, and one of them alone: make fuzz TIME=600 TARGET=server
TIME ?= 60
TARGET ?=
# The sanitizers' runtimes must be there before Python, which must take all memory from malloc: what
# is read beyond an end in a pool of Python's own is not seen.
SANITIZED = PYTHONPATH=build/sanitize:. PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" $(BIN)/python -P

.PHONY: help java demo test pure sanitize check format hooks bench simulate fuzz mutants docs clean
.DEFAULT_GOAL := help

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

java:
	@sh deploy/java.sh

demo: $(INSTALLED) java ## write 336,776 flights with Spark, stream them to three consumers, compare
	$(BIN)/python -m deploy.demo

test: $(INSTALLED) java ## run the tests (ARGS="-k name" for some of them)
	$(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder $(ARGS)

check: $(INSTALLED) ## lint, types, who imports whom, generated documents
	$(BIN)/ruff check $(SOURCES) .ci
	$(BIN)/ruff format --check $(SOURCES) .ci
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports --no-logo --no-cache
	grep -rlZE 'async (def|with|for)' --include='*.py' --exclude='test_*.py' $(SOURCES) | \
		xargs -0 -n 20 -P $(CORES) \
		$(BIN)/flake8-async --enable ASYNC1,ASYNC2,ASYNC4,ASYNC912,ASYNC913 \
		--startable-in-context-manager _hold
	$(BIN)/python docs/generate_protocol.py --check docs/protocol.md
	$(BIN)/python -m docs.generate_vectors --check docs/vectors

format: $(INSTALLED) ## mend what the tools can: format, order of imports
	$(BIN)/ruff check --fix --exit-zero --quiet $(SOURCES) .ci
	$(BIN)/ruff format $(SOURCES) .ci

hooks: $(INSTALLED) ## check each commit and its first line before it is made
	$(BIN)/pre-commit install

bench: $(INSTALLED_BENCH) ## measure against the peers, over an hour (ROW=B1 for one row)
	$(BIN)/python -m benchmarks $(ROW)

pure: $(INSTALLED) ## test chunks, wire and engine, and simulate 2 clusters, without the library in C
	UPR_PURE_PYTHON=1 $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder $(ARGS) \
		--ignore=tests/engine/test_long_runs.py tests/protocol/chunk tests/protocol/wire tests/engine
	UPR_PURE_PYTHON=1 $(BIN)/python -m tests.simulation --seeds 2

sanitize: $(INSTALLED) ## run the kernel's tests under ASan and UBSan, and fuzz it (TIME=600 seconds)
	rm -rf build/sanitize && mkdir -p build/sanitize && cp -r upr_kernel build/sanitize/
	CFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
		$(BIN)/python hatch_build.py build/sanitize/upr_kernel
	$(SANITIZED) -m pytest -n 0 -o pythonpath="build/sanitize ." tests/kernel
	$(SANITIZED) -m tests.kernel.fuzz --seconds $(TIME) $(TARGET)

simulate: $(INSTALLED) ## simulate clusters under faults (SEEDS=2000, FIRST=0; SEED=7 for one)
	$(BIN)/python -m tests.simulation $(SIMULATED)

fuzz: $(INSTALLED_FUZZ) ## look for bytes that break a promise (TIME=60 seconds for each target)
	$(BIN)/python -m tests.fuzz $(TARGET) --seconds $(TIME)

mutants: $(INSTALLED) ## break lines, list those that no test fails for (MODULE=…, SAMPLE=20)
	$(BIN)/python -m tests.mutation --sample $(SAMPLE) $(MODULE)

docs: $(INSTALLED_DOCS) ## write docs/protocol.md and docs/vectors, build the site, check its links
	$(BIN)/python -m docs.generate_vectors --write docs/vectors
	$(BIN)/python docs/generate_protocol.py --write docs/protocol.md
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs docs/_build/html
	@echo "The site begins at docs/_build/html/index.html"

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt hatch_build.py $(wildcard upr_kernel/native/*)
	@test -n "$(PYTHON)" && "$(PYTHON)" $(NEW_ENOUGH) 2>/dev/null || { echo "UPR needs Python 3.11 or newer:\
	 install it, or say where it is: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON); this is done once."
	@"$(PYTHON)" -m venv $(VENV)
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(INSTALLED_BENCH): $(INSTALLED)
	@$(PIP_INSTALL) -e '.[dev,bench]'
	@touch $@

$(INSTALLED_FUZZ): $(INSTALLED)
	@$(PIP_INSTALL) -e '.[dev,fuzz]'
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	@$(PIP_INSTALL) -e '.[dev,docs]'
	@touch $@
