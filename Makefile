# make env    makes .venv with everything in it: mpp, torchrun, pytest
# make demo   trains a small GPT on four CPU ranks, stock 1F1B beside V-Half   (TEXT=folder or .txt, OUT=folder)
# make test   lint, types and tests: some ten minutes on two idle cores      (ARGS=what pytest should get)
# make test-all   make test with all that is marked `wide`, then the parity tests on the older releases
# make test-frameworks   Megatron-Bridge, ms-swift and verl under our schedules, in an environment of their own
#                        (NEMO_RL=checkout and SLIME=checkout: these too)
# make test-matrix   the parity tests on every release of Megatron; make smoke, a few of them on the older ones and torch
# make mutants   breaks one place of the source at a time; do tests notice?         (ROOM=pipedream/partition or WORD=split.py, LOOPS=1)
# make fuzz   draws random jobs and compares each with stock Megatron              (N=number SEED=draw CASE=one)
# make faults   kills, stops and terminates ranks at random moments, and resumes   (N=number SEED=draw CASE=one)
# make lock   renews requirements.lock, from which make env installs

# The newest interpreter that the project supports.  A python3.12 that does not run (an inactive pyenv shim) is passed over.
PYTHON := $(shell for python in python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
UV := $(BIN)/python -m uv
# Without bytecode every worker and command compiles the tests and the package anew: a minute of a core.
unexport PYTHONDONTWRITEBYTECODE
# A worker a core: more of them repeat the runs of stock Megatron that neighbouring tests share (on two cores, four took
# 18 minutes and two took 15).  A worker that is done takes over half of what another one has left.
PARALLEL := -n logical --maxprocesses 4 --dist worksteal
# The tests of what runs on Megatron, which each of its releases has to pass.
ON_MEGATRON := tests/megatron $(wildcard tests/features/*/megatron)
# Releases of megatron-core that are tested beside the newest, each in a .venv-RELEASE of its own.
OLDER := 0.17.1 0.18.2
# The torch of most clusters today, with what it needs at one exact version and what .venv has not got: of CUDA's
# libraries only one, since .venv's have the same major version. That is a download of 742 MiB.
torch-2.11 := torch==2.11.0 triton==3.6.0 nvidia-curand==10.4.0.35
# Trainers on megatron.core, with what they import that .venv has not got.
frameworks := -r tests/frameworks/requirements.txt
# What the environment of a target is made for.
anew = $(or $($*),megatron-core==$*)
packages = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

.PHONY: env demo test test-all test-frameworks test-matrix smoke smoke-frameworks lint lock clean mutants faults fuzz

env: .venv/.installed

.venv/.installed: pyproject.toml requirements.lock
	@if test -z "$(PYTHON)"; then echo "make env: no Python 3.12 or 3.13 found; install one, or set PYTHON=/path/to/python3.12"; exit 1; fi
	@echo "make env: installing into .venv: 6.4 GB in a minute or more, the first time and when requirements.lock changes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# uv takes half a minute where pip takes several; either installs the same files.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv || echo "make env: going on with pip"
	@# Without bytecode every rank would compile torch and Megatron anew: 40 seconds instead of 8.
	if $(UV) --version >/dev/null 2>&1; then \
		$(UV) pip install --python $(BIN)/python --compile-bytecode -r requirements.lock && \
		$(UV) pip install --python $(BIN)/python --no-deps -e .; \
	else \
		$(BIN)/python -m pip install --compile -r requirements.lock && \
		$(BIN)/python -m pip install --no-deps -e .; \
	fi
	@touch $@

demo: env
	$(BIN)/python -W ignore::UserWarning scripts/demo.py $(if $(TEXT),--text $(TEXT)) $(if $(OUT),--out $(OUT))

test: lint
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: lint
	$(BIN)/python -m pytest $(PARALLEL) -m "" $(ARGS)
	$(MAKE) $(OLDER:%=test-%) test-frameworks

test-matrix: env $(OLDER:%=test-%)
	$(BIN)/python -m pytest $(PARALLEL) $(ON_MEGATRON) $(ARGS)

smoke: $(OLDER:%=smoke-%) smoke-torch-2.11 smoke-frameworks

# Importing a framework takes longer than a test, and the ranks of one test fill two cores: no workers.  One process
# for each: mcore-bridge, which ms-swift is on, changes Megatron for all that is in its own.  NeMo-RL and slime are in
# no registry: NEMO_RL and SLIME name their checkouts.
test-frameworks: .venv-frameworks/.installed
	.venv-frameworks/bin/python -m pytest -n 0 -m "" tests/frameworks/test_megatron_bridge*.py $(ARGS)
	.venv-frameworks/bin/python -m pytest -n 0 -m "" tests/frameworks/test_swift.py $(ARGS)
	.venv-frameworks/bin/python -m pytest -n 0 -m "" tests/frameworks/test_verl.py $(ARGS)
	$(if $(NEMO_RL),NEMO_RL=$(NEMO_RL) .venv-frameworks/bin/python -m pytest -n 0 -m "" tests/frameworks/test_nemo_rl.py $(ARGS))
	$(if $(SLIME),SLIME=$(SLIME) .venv-frameworks/bin/python -m pytest -n 0 -m "" tests/frameworks/test_slime.py $(ARGS))

smoke-frameworks: .venv-frameworks/.installed
	.venv-frameworks/bin/python -m pytest -n 0 tests/frameworks/test_megatron_bridge.py -k v-half-tied $(ARGS)

.venv-frameworks/.installed: tests/frameworks/requirements.txt

test-%: .venv-%/.installed
	REQUESTED=$(firstword $(anew)) .venv-$*/bin/python -m pytest $(PARALLEL) -m "" $(ON_MEGATRON) $(ARGS)

smoke-%: .venv-%/.installed
	REQUESTED=$(firstword $(anew)) .venv-$*/bin/python -m pytest $(PARALLEL) -m "" @tests/smoke.txt $(ARGS)

# Only that is installed anew; all else comes from .venv, which is searched second.
.PRECIOUS: .venv-%/.installed
.venv-%/.installed: .venv/.installed
	$(BIN)/python -m venv --clear --without-pip .venv-$*
	@printf 'import site; site.addsitedir("%s")\n' "$(call packages,.venv)" > "$(call packages,.venv-$*)/all-else.pth"
	if $(UV) --version >/dev/null 2>&1; then \
		$(UV) pip install --python .venv-$*/bin/python --compile-bytecode --no-deps $(anew); \
	else \
		$(BIN)/python -m pip --python .venv-$*/bin/python install --compile --no-deps $(anew); \
	fi
	@touch $@

mutants: env
	$(if $(WORD),,$(BIN)/python -m tests.hunt.mutants.pure_rooms $(ROOM) $(if $(N),--number $(N)) $(if $(SEED),--seed $(SEED)) $(if $(LOOPS),--loops))
	$(if $(ROOM)$(LOOPS),,$(BIN)/python -m tests.hunt.mutants.defects $(WORD))

fuzz: env
	$(BIN)/python -W ignore -m tests.hunt.fuzz $(if $(N),--cases $(N)) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE))

faults: env
	$(BIN)/python -m tests.hunt.faults $(if $(N),--cases $(N)) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE))

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: env
	$(UV) pip compile --universal --python-version 3.12 --extra dev --upgrade --quiet --no-header --no-annotate \
		pyproject.toml -o requirements.lock

clean:
	rm -rf .venv .venv-* build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
