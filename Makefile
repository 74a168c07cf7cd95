# Each target sets up .venv first, which takes a tenth of a second if nothing has changed.
PYTHON ?= python3
RECIPE ?=
ARGS ?=
EXTRAS ?=

# Without byte code every process compiles its imports again, which takes up to 20 s.
unexport PYTHONDONTWRITEBYTECODE

FIND_PYTHON = @command -v $(PYTHON) >/dev/null || \
	{ echo "$(PYTHON) was not found. Install Python 3.11 or newer, or choose another with PYTHON=…" >&2; exit 1; }
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest

.PHONY: help setup tools soaktools train test lint soak nightly docs wheel bench kernels audit
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create .venv with what training needs [EXTRAS="data low-bit finetune fp8 wandb remote"] (UV=none installs with pip)
	$(FIND_PYTHON)
	@$(PYTHON) -S scripts/setup.py $(EXTRAS)

# As setup, with the development tools.
tools:
	$(FIND_PYTHON)
	@$(PYTHON) -S scripts/setup.py dev

# With a server of object storage for the long tests, of 180 MB.
soaktools:
	$(FIND_PYTHON)
	@$(PYTHON) -S scripts/setup.py dev soak

train: setup ## train [RECIPE=name or path] [ARGS="key=value …"]
	.venv/bin/redline train $(RECIPE) $(ARGS)

test: tools ## run the linters and, at the same time, all tests except the long ones [ARGS="pytest options"]
	@$(MAKE) --no-print-directory lint & lint=$$!; \
	$(PYTEST) -n 2 -m "not soak" $(ARGS); tests=$$?; wait $$lint && exit $$tests

lint: tools ## run ruff, mypy and import-linter
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports

soak: soaktools ## run the long tests [ARGS="pytest options"]
	HYPOTHESIS_PROFILE=default $(PYTEST) -m soak $(ARGS)

nightly: soaktools ## run everything in parts; a restart goes on with the parts that are missing [ARGS=--again]
	.venv/bin/python scripts/nightly.py $(ARGS)

docs: ## build the pages as a site with search in build/site/ [ARGS=--check]
	$(FIND_PYTHON)
	@$(PYTHON) -S scripts/setup.py docs
	@.venv/bin/python scripts/site_builder.py $(ARGS)

wheel: tools ## build the wheel and the source archive in dist/, and print their paths
	@.venv/bin/python -m hatchling build --clean

bench: setup ## compare with other programs [ARGS="throughput, finetune, latent, plan-accuracy or time-to-loss …"]
	.venv/bin/python -m benchmarks $(or $(ARGS),throughput)

# About five CPU minutes the first time; what has not changed is taken from .kernels/.
kernels: tools ## compile every Triton kernel for six GPU architectures, without a GPU [ARGS=--check]
	.venv/bin/python scripts/compile_kernels.py $(ARGS)

# pip-audit gets an environment of its own, because nothing here needs what it installs.
audit: ## look up known vulnerabilities of the pinned versions in public databases
	$(FIND_PYTHON)
	@test -x .audit/bin/pip-audit || { $(PYTHON) -m venv .audit && .audit/bin/pip install --quiet pip-audit; }
	.audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt
