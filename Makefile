# Two commands for a fresh machine with Python >= 3.10, make, pip and git:
#   make demo    install into .venv and run the main job
#   make test    install into .venv and run the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Small models on the CPU: several threads per operation cost more than they bring.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint clean

# constraints.txt holds torch's version too: one resolution, no second torch on top of the first.
$(VENV)/installed: setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/accelerate launch --config_file launch/cpu.yaml train.py probe=simple

# A process per core and file; python -m pytest tests/test_X.py runs one file here.
test: $(VENV)/installed
	HF_HUB_OFFLINE=1 WANDB_MODE=offline $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
