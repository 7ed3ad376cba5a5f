# make demo   sets everything up in .venv and runs the main job
# make test   sets everything up and passes all quick tests; make slow the rest that needs no GPU
# make lint   ruff and mypy; make format rewrites the files; make clean removes what these commands made
PYTHON ?= python3
PRESET ?= k3-tiny
WORKERS ?= 2

VENV := .venv
RUN := $(VENV)/bin/python
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest

.PHONY: demo test slow lint format clean

demo: $(VENV)/ready-run
	$(RUN) -m moec.demo --preset $(PRESET) --out demo-out

test: $(VENV)/ready-dev
	$(PYTEST) -n $(WORKERS) -m "not slow and not gpu"

slow: $(VENV)/ready-dev
	$(PYTEST) -n $(WORKERS) -m "slow and not gpu"

lint: $(VENV)/ready-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) tools/typecheck.py

format: $(VENV)/ready-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) build moec.egg-info demo-out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/ready-torch:
	$(PYTHON) tools/make_venv.py $(VENV)
	touch $@

$(VENV)/ready-run: pyproject.toml $(VENV)/ready-torch
	$(RUN) -m pip install --quiet --editable .
	touch $@

$(VENV)/ready-dev: pyproject.toml $(VENV)/ready-torch
	$(RUN) -m pip install --quiet --editable '.[test,lint]'
	touch $(VENV)/ready-run $@
