# Every target sets itself up in .venv first; when nothing changed that costs a tenth of a second.
PYTHON ?= python3
RECIPE ?=
ARGS ?=
EXTRAS ?=

# Without byte code every process would compile its imports again, for up to 20 s.
unexport PYTHONDONTWRITEBYTECODE

FIND_PYTHON = @command -v $(PYTHON) >/dev/null || \
	{ echo "There is no $(PYTHON) here: install Python 3.11 or newer, or name one with PYTHON=…" >&2; exit 1; }
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest

.PHONY: help setup tools train test lint soak bench audit
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with what training needs [EXTRAS="data low-bit finetune fp8 wandb"] (UV=none installs with pip)
	$(FIND_PYTHON)
	@$(PYTHON) -S scripts/setup.py $(EXTRAS)

# As setup, and what development needs.
tools:
	$(FIND_PYTHON)
	@$(PYTHON) -S scripts/setup.py dev

train: setup ## train [RECIPE=name or path] [ARGS="key=value …"]
	.venv/bin/redline train $(RECIPE) $(ARGS)

test: tools ## lint, and beside it all tests but the long ones [ARGS=…]
	@$(MAKE) --no-print-directory lint & lint=$$!; \
	$(PYTEST) -n 2 -m "not soak" $(ARGS); tests=$$?; wait $$lint && exit $$tests

lint: tools ## ruff, mypy, and the import rules
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/lint-imports

soak: tools ## the fault tests at their long size [ARGS=…]
	HYPOTHESIS_PROFILE=default $(PYTEST) -m soak $(ARGS)

bench: setup ## compare with other programs [ARGS="throughput, finetune, latent, plan-accuracy or time-to-loss …"]
	.venv/bin/python -m benchmarks $(or $(ARGS),throughput)

# In an environment of its own: none of what it brings is needed here.
audit: ## known vulnerabilities of the pinned versions; asks public databases
	$(FIND_PYTHON)
	@test -x .audit/bin/pip-audit || { $(PYTHON) -m venv .audit && .audit/bin/pip install --quiet pip-audit; }
	.audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt
