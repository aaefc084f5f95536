# `make help` lists the targets. Each one sets up what it needs first (see scripts/setup.sh) and is quick when that is done.
#
#   PYTHON=python3.11   the interpreter to build the environment from (default: the first that fits)
#   VENV=.venv          path of the environment
#   SETUP=none          no environment, no pip: use PYTHON (default python3) with the packages it has
#   ARGS="..."          more options for pytest (make test) or for the example (make train, make train-moe)

VENV ?= .venv
SETUP ?= auto
ARGS ?=
export VENV SETUP PYTHON

ifeq ($(SETUP),none)
  PY := $(if $(PYTHON),$(PYTHON),python3)
  BIN :=
else
  PY := $(VENV)/bin/python
  BIN := $(VENV)/bin/
endif
RUN := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PY)

.DEFAULT_GOAL := help
.PHONY: help train train-moe test test-integrations mutants same-bits search te-versions torch-versions python-versions lint format docs docs-commands coverage clean clean-venv

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

train:  ## set up, train the example, save, resume on a different mesh
	@scripts/setup.sh example
	@scripts/train.sh $(PY) $(ARGS)

train-moe:  ## set up, train a mixture of experts on several meshes, resume at another ep size, plot all losses
	@scripts/setup.sh example
	@scripts/train_moe.sh $(PY) $(ARGS)

test:  ## set up, then run every test that this machine can run
	@scripts/setup.sh test
	@scripts/test.sh $(PY) $(ARGS)

test-integrations:  ## install the frameworks that te_fsdp.integrations is for, then run the tests that need them
	@scripts/setup.sh test integrations triton
	$(RUN) -m pytest $(foreach name,integrations fabric accelerate lora torchtitan,tests/pytorch/distributed/test_$(name).py) $(ARGS)

mutants:  ## apply each mutant and check that its tests fail (some 25 minutes; ARGS="sharding --k wire")
	@scripts/setup.sh test
	$(RUN) scripts/mutants.py $(ARGS)

same-bits:  ## compare training of this tree and another commit bit for bit (about 10 minutes; ARGS="--before COMMIT")
	@scripts/setup.sh test
	$(PY) scripts/same_bits $(ARGS)

search:  ## train 300 random configurations and compare each with stock TE in one process (ARGS="--seed 1 --count 20")
	@scripts/setup.sh test
	$(RUN) scripts/search $(ARGS)

te-versions:  ## the emulation's tests and a short sharded training with the other supported versions of TransformerEngine
	@scripts/setup.sh test
	@scripts/te_versions.sh $(PY)

torch-versions:  ## the distributed tests on the CPU with torch 2.11, 2.14 and 2.15 (downloads each; VERSIONS="..." for others)
	@scripts/setup.sh test
	@ARGS="$(ARGS)" scripts/torch_versions.sh $(PY) $(VERSIONS)

python-versions:  ## the checkpoint tests with the oldest and newest patch release of each Python on this machine (PYTHONS="..." for others)
	@ARGS="$(ARGS)" scripts/python_versions.sh $(PYTHONS)

lint:  ## ruff (lint and format), pyrefly, import-linter, codespell, shellcheck, hadolint, the workflow's schema
	@scripts/setup.sh lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyrefly check
	$(BIN)lint-imports --no-logo
	$(PY) -m codespell_lib
	$(BIN)shellcheck .ci/run scripts/*.sh
	@# DL3008: a release of Debian has one version of a package, and keeps no older ones that could be pinned.
	$(BIN)hadolint --failure-threshold warning --ignore DL3008 Dockerfile
	$(BIN)check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml

format:  ## rewrite the sources as ruff wants them
	@scripts/setup.sh lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs:  ## build the documentation into docs/_build/html; a warning is an error
	@scripts/setup.sh docs
	$(RUN) -m sphinx -W --keep-going -E -b html docs docs/_build/html

docs-commands:  ## run each command of README and pages that needs neither a network nor GPUs (some 5 minutes)
	@scripts/setup.sh example test
	$(RUN) -m pytest tests/pytorch/distributed/test_commands.py --matrix full $(ARGS)

coverage:  ## run the tests and report the coverage of te_fsdp (the emulation aside); below 90 % is an error
	@scripts/setup.sh test
	$(PY) -m coverage erase
	OMP_NUM_THREADS=1 $(RUN) -m coverage run -m pytest tests $(ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report

clean:  ## remove the results of the other targets, except the environment
	rm -rf out build dist docs/_build .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-venv:  ## remove the environment
	rm -rf "$(VENV)"
