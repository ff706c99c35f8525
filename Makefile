# Everything a newcomer needs: `make demo` and `make test` work from a clean clone.

PYTHON       ?= python3
VENV         := .venv
BIN          := $(VENV)/bin
INSTALLED    := $(VENV)/.installed
USERS        := $(VENV)/.users
TRITON       := $(VENV)-triton/.installed
BENCH_VENV   := .venv-bench
BENCH_READY  := $(BENCH_VENV)/.installed
BENCH        ?=
ARGS         ?=
ACT          ?=
COMMIT       ?= $(shell git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null)
# Of tests/unit: what trains networks, and so takes minutes.
TRAINS       := training export models api test_doors.py test_cli_stages.py test_notebook.py
TYPES        := $(BIN)/mypy && $(BIN)/lint-imports
TEXTS        := tests/architecture/test_sources.py tests/architecture/test_texts.py

.DEFAULT_GOAL := help
.NOTPARALLEL:

# Tests and stacks start hundreds of Python processes: without bytecode each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Triton's Python backend loads libpython: prints Debian's package for it, and succeeds, when it cannot be loaded here.
define LIBPYTHON
import ctypes, os, sys, sysconfig
name = "libpython%d.%d" % sys.version_info[:2]
for place in (name + ".so.1.0", os.path.join(sysconfig.get_config_var("LIBDIR"), name + ".so.1.0")):
    try:
        ctypes.CDLL(place)
    except OSError:
        continue
    sys.exit(1)
print(name)
endef
export LIBPYTHON
.PHONY: help install demo payments test unit coverage chaos cluster-test parity ways sending faults gpu-test gpu-scale gpu-billion soak lint ruff format docs hooks release bench bench-check bench-setup system-deps clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(USERS) $(TRITON) ## the environments, without running anything

demo: $(USERS) $(TRITON) ## raw tables to a served model, then a rollout that is promoted and one that is rolled back; ACT=drift: the drift alarm
	@$(if $(filter-out drift,$(ACT)),$(error ACT=$(ACT) is unknown; the demo has ACT=drift))
	@$(BIN)/python examples/flights/$(if $(ACT),drift,demo).py

payments: $(USERS) $(TRITON) ## card fraud: served windows, labels, an alarm, a retraining under a canary; writes a page with pictures
	@$(BIN)/python examples/payments/run.py $(ARGS)

# Types and import rules are checked beside the tests, which wait most of the time; what they find comes last.
test: $(INSTALLED) $(TRITON) ruff ## lint and all tests; reports what was skipped and why
	@$(BIN)/python -m serin.prefect.template  # once, before several tests need it at the same time
	@said=$$(mktemp); { $(TYPES); } >$$said 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --no-loadscope-reorder $(ARGS); tests=$$?; \
	wait $$types; types=$$?; \
	if [ $$types != 0 ]; then cat $$said; echo "make test: the types or the import rules are broken, see above" >&2; fi; \
	rm -f $$said; \
	exit $$((tests + types))

# What needs no server is in tests/unit: no Prefect, Triton, Envoy or browser is started, and Triton need not be installed.
unit: $(INSTALLED) ## the tests that start no server and train no network, in a few minutes
	@$(BIN)/python -m pytest tests/unit $(TRAINS:%=--ignore=tests/unit/%) -n auto --maxprocesses=4 --no-loadscope-reorder $(ARGS)

# A separate target: measuring makes Python 3.11 slower (docs/log/operate.md). Newer Pythons use sys.monitoring.
coverage: $(INSTALLED) $(TRITON) ## all tests, with the share of lines they run; the report is in build/coverage
	@mkdir -p build
	COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")') \
	  $(BIN)/python -m pytest -n auto --maxprocesses=4 --no-loadscope-reorder \
	  --cov --cov-report=term:skip-covered --cov-report=html --cov-report=xml $(ARGS)

cluster-test: $(INSTALLED) $(TRITON) ## several hosts, Slurm, Kubernetes and containers on this machine (needs root; installs what it needs)
	@$(BIN)/python -m tests.cluster $(ARGS)

parity: $(INSTALLED) $(TRITON) ## every scenario where it is served: make parity PLACE=machine, hosts, kubernetes or foreign
	@$(BIN)/python -m tests.parity $(or $(PLACE),machine) $(ARGS)

ways: $(INSTALLED) $(TRITON) ## every way of starting a run, with what it can send: make ways PLACE=machine, host, slurm or kubernetes
	@$(BIN)/python -m tests.ways $(or $(PLACE),machine) $(ARGS)

sending: $(INSTALLED) ## the seconds that sending by content adds to a run, on one machine and from elsewhere
	@$(BIN)/python -m tests.ways.sending

faults: $(INSTALLED) $(TRITON) ## parts killed, stopped and cut off under load, and what it costs: make faults PLACE=machine or hosts
	@$(BIN)/python -m tests.parity.faults $(or $(PLACE),machine) $(ARGS)

# Installs nothing: a GPU machine may have no network. A PYTHON that is named is used instead of .venv.
gpu-test: ## everything that needs a GPU, in under ten minutes, as one table: make gpu-test PYTHON=python3
	@$(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu --commit "$(COMMIT)" $(ARGS)

gpu-scale: ## 100 M rows with strings on a GPU, in ten minutes: make gpu-scale PYTHON=python3
	@$(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.scale $(ARGS)

gpu-billion: ## a network with a billion weights, trained, exported and served on a GPU, in ten minutes: make gpu-billion PYTHON=python3
	@$(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.billion $(ARGS)

soak: $(INSTALLED) ## the long runs: a table larger than the memory of its workers, thousands of random tables, 30 minutes of requests
	$(BIN)/python -m tests.soak.larger_than_memory $(ARGS)
	$(BIN)/python -m tests.soak.serving --minutes 30
	$(BIN)/python -m pytest tests/unit/columns tests/unit/features tests/unit/etl/test_table_forms.py --hypothesis-profile=soak --timeout=0
	$(BIN)/python -m tests.soak.fuzz
	$(BIN)/python -m tests.soak.flights_quality
	$(BIN)/python -m tests.soak.messages
	$(BIN)/python -m tests.soak.resets
	$(BIN)/python -m tests.soak.native_fuzz
	$(BIN)/python -m tests.soak.compilers
	$(BIN)/python -m tests.soak.drift

chaos: $(INSTALLED) $(TRITON) ## candidates that fail on purpose under load; every part killed and frozen, also while pipelines run
	$(BIN)/python -m tests.chaos.faults
	$(BIN)/python -m tests.chaos.rollout
	$(BIN)/python -m tests.chaos.shadow
	$(BIN)/python -m tests.chaos.lease_clients --clients 20 --rounds 30 --deaths 40
	$(BIN)/python -m tests.chaos.orchestration
	$(BIN)/python -m tests.chaos.schedules
	$(BIN)/python -m tests.chaos.scores

lint: ruff ## ruff, mypy --strict, import rules, what sources and texts may say
	$(TYPES)
	$(BIN)/python -m pytest -q -n 0 --no-header $(TEXTS)

ruff: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## format and fix the sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED) ## the documentation site, in build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server -d build/site"

hooks: $(INSTALLED) ## lint before each commit of this clone, with the programs of .venv
	$(BIN)/pre-commit install

release: $(INSTALLED) ## sdist and wheel, tried in an empty folder; then the tag (DRY_RUN=1: no tag)
	@PYTHON=$(BIN)/python DRY_RUN=$(DRY_RUN) .ci/release

bench: $(INSTALLED) $(TRITON) $(BENCH_READY) ## all benchmarks, goals met and missed; or one: make bench BENCH=etl ARGS=--full
	@$(BIN)/python -m $(if $(BENCH),benchmarks $(BENCH),benchmarks.suite --commit "$(COMMIT)") $(ARGS)

# Its references need no other environment than ours.
bench-check: $(INSTALLED) $(TRITON) ## five minutes: fails when a part became slower than the committed ratios
	@$(BIN)/python -m benchmarks.check --commit "$(COMMIT)" $(ARGS)

bench-setup: $(BENCH_READY) ## the peers' own environment

system-deps: ## install the Debian packages that the tests need (needs root; does nothing elsewhere)
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "system-deps: not root, or no apt-get: nothing installed"; exit 0; fi; \
	missing=""; \
	command -v git >/dev/null || missing="$$missing git"; \
	command -v $(PYTHON) >/dev/null || missing="$$missing python3"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	lib=$$($(PYTHON) -c "$$LIBPYTHON" 2>/dev/null) && missing="$$missing $$lib"; \
	browser=""; command -v chromium >/dev/null || browser="chromium"; \
	alerts=""; command -v prometheus >/dev/null || alerts="prometheus"; \
	command -v prometheus-alertmanager >/dev/null || alerts="$$alerts prometheus-alertmanager"; \
	if [ -z "$$missing$$browser$$alerts" ]; then echo "system-deps: nothing is missing"; exit 0; fi; \
	echo "system-deps: installing$$missing $$browser $$alerts"; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -q; \
	if [ -n "$$missing" ]; then apt-get install -q -y --no-install-recommends $$missing || exit 1; fi; \
	if [ -n "$$browser" ]; then apt-get install -q -y --no-install-recommends $$browser \
	  || echo "system-deps: no Chromium: the tests will skip Prefect's pages"; fi; \
	if [ -n "$$alerts" ]; then RUNLEVEL=1 apt-get install -q -y --no-install-recommends $$alerts \
	  || echo "system-deps: no Prometheus: the tests will skip its rules and its dashboard"; fi

clean: ## caches, builds and environments; leaves .serin/ (stop the stack first: serin down)
	rm -rf $(VENV) $(VENV)-triton $(BENCH_VENV) build dist
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What users need is installed by `make install` and `make demo`; $(INSTALLED) adds what developers need.
$(USERS): pyproject.toml constraints.txt
	@if [ -e $(INSTALLED) ] && [ -z "$$(find pyproject.toml constraints.txt -newer $(INSTALLED))" ]; then exit 0; fi; \
	$(PYTHON) .ci/install.py users
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) .ci/install.py developers
	@touch $@

# Triton's Python stub breaks with numpy 2, so it has a separate environment (docs/adr/0002).
$(TRITON): constraints.txt serin/serving/triton/installation.py \
           $(wildcard $(addprefix serin/serving/native/,*.py sources/*.* sources/*/*.*) triton_models/onnx_native/*.*) | $(USERS)
	@$(BIN)/serin install triton
	@touch $@

$(BENCH_READY): benchmarks/requirements.txt .ci/install.py
	@$(PYTHON) .ci/install.py peers
	@touch $@
