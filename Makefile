# make demo: the main job on the built-in tiny model; make test: the tests; make check-code: format, lint, types.
# Each makes .venv and installs the package in it the first time, and again when pyproject.toml has changed.

PYTHON ?= python3
export TOKENIZERS_PARALLELISM ?= false

# The launcher lists what it was not told, and adds a traceback to every failure, unless it is told and quiet
ONE_PROCESS = --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

.PHONY: demo test check-code install clean

demo: install
	.venv/bin/accelerate launch $(ONE_PROCESS) -m vlm_grpo.train task=refcoco $(ARGS)

# Two processes of one thread each are faster here than one process of many threads
test: install
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 $(ARGS)

check-code: install
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright

install: .venv/installed

.venv/installed: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
