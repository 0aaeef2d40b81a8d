# A newcomer needs two of these: `make run` and `make test`.
#
# Needs python3 (3.11), git, make; installs the rest into .venv, and a few system libraries with apt when root.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
ARGS   ?=

LIBRARIES := libibverbs1 librdmacm1 libnuma1 libcurl4

.DEFAULT_GOAL := help
.PHONY: help setup libraries run test lint golden harnesses sglang image containers constraints clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) libraries ## virtual environment, packages, system libraries

# Made once, and again when what it holds may have changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "make: $(PYTHON) is `$(PYTHON) --version 2>&1`, but the packages are pinned for Python 3.11." >&2; \
	  echo "  -> install python3.11 and run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "`id -u`" = 0 ]; then apt-get update -q && apt-get install -q -y python3-venv; else \
	  echo "make: $(PYTHON) cannot make virtual environments." >&2; \
	  echo "  -> sudo apt-get install python3-venv" >&2; exit 1; fi; }
	@echo "make: setting up $(VENV), once: about 1.5 GB and some minutes"
	@test -x $(BIN)/python && $(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "make: installing PyTorch (1 of 2)"
	@$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	@echo "make: installing everything else (2 of 2)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[cpu,dev]'
	@touch $@

# Mooncake loads these; without them weights travel through shared memory, and the run says so.
libraries:
	@missing=""; for package in $(LIBRARIES); do \
	  ldconfig -p 2>/dev/null | grep -q "$$(echo $$package | sed 's/[0-9]*$$//')\.so" || missing="$$missing $$package"; done; \
	if [ -n "$$missing" ]; then \
	  if [ "`id -u`" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -q && apt-get install -q -y --no-install-recommends $$missing \
	      || echo "make: could not install$$missing; weights will go through shared memory" >&2; \
	  else echo "make: for the Mooncake transport install$$missing: sudo apt-get install$$missing" >&2; \
	       echo "  -> without them weights go through shared memory" >&2; fi; fi

run: setup ## run the quickstart: train a tiny policy, watch its reward rise
	$(BIN)/gyre run examples/quickstart.toml $(ARGS)

test: setup ## run the tests; what is skipped is listed with its reason
	$(BIN)/python -m pytest -q -rs $(ARGS)

lint: setup ## style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

golden: setup ## make the simulated logs in tests/golden that are missing; ARGS=--anew for all
	$(BIN)/python -m tests.golden.simulated $(ARGS)

harnesses: setup ## install the real harness programs that some tests run, into state/harnesses: about 2 GB, some minutes
	$(BIN)/python -m tests.harnesses.install $(ARGS)

sglang: setup ## install a real SGLang server without an accelerator into .venv-sglang, which some tests run
	$(BIN)/python -m tests.sglang.install

image: setup ## container image of every service; BASE=IMAGE to build on another Debian 12
	deploy/container/image.sh $(BIN)/python localhost/qwengyre:latest $(BASE)

BASE_HERE := localhost/debian:bookworm
containers: setup ## bring the quickstart up in containers, for a test; needs Debian and root
	deploy/container/tools.sh
	podman image exists $(BASE_HERE) || deploy/container/base.sh $(BASE_HERE)
	deploy/container/image.sh $(BIN)/python localhost/qwengyre:latest $(BASE_HERE)
	$(BIN)/python -m pytest -q -rs -m containers tests/deploy $(ARGS)

constraints: ## write down the versions that are installed now
	@{ echo '# Versions that were tested together; pyproject.toml says what is needed. Made by `make constraints`.'; \
	   $(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//' | grep -v ' @ '; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## remove the environment, caches and the state of all runs
	rm -rf $(VENV) .venv-sglang .venv-sglang.lock state *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
