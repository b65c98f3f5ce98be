# make demo: the main job on the built-in tiny model; make test: the tests; make test-fast: those that are not marked
# slow, in 3 minutes; make check-code: format, lint, types; make docs: the pages, in site/. Each makes .venv and
# installs the package in it the first time, and again when pyproject.toml has changed.

PYTHON ?= python3
export TOKENIZERS_PARALLELISM ?= false

# The launcher lists what it was not told, and adds a traceback to every failure, unless it is told and quiet
ONE_PROCESS = --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

.PHONY: demo test test-fast check-code docs tiny install clean

demo: install
	.venv/bin/accelerate launch $(ONE_PROCESS) -m vlm_grpo.train task=refcoco $(ARGS)

# Two processes of one thread each are faster here than one process of many threads
test: install
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 $(ARGS)

test-fast: install
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 -m "not slow" $(ARGS)

check-code: install
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright

docs: install .venv/docs-installed
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

# The shipped model from nothing: random weights, mixed questions, then the one question with inexact boxes
SFT = .venv/bin/accelerate launch $(ONE_PROCESS) -m vlm_grpo.sft task=tiny_warm_start freeze_vision=false \
	lr_scheduler=cosine adam_beta2=0.95 weight_decay=0.01 max_tokens_per_row=1024
tiny: install
	.venv/bin/python -m data_scripts.build_tiny out=build/tiny/random
	$(SFT) model=build/tiny/random output_dir=build/tiny/named task_args.stage=named max_steps=1800 batch_size=32 \
		learning_rate=2e-3 warmup_steps=100
	$(SFT) model=build/tiny/named output_dir=build/tiny/dense task_args.stage=dense max_steps=400 batch_size=32 \
		learning_rate=1e-3 warmup_steps=20
	$(SFT) model=build/tiny/dense output_dir=build/tiny/refer task_args.stage=refer task_args.looseness=0.7 \
		max_steps=200 batch_size=32 learning_rate=1e-3 warmup_steps=20
	.venv/bin/python -m data_scripts.build_tiny out=vlm_grpo/tiny trained=build/tiny/refer

install: .venv/installed

.venv/installed: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -e '.[dev]'
	touch $@

# After the package, whose extra it is
.venv/docs-installed: .venv/installed
	.venv/bin/python -m pip install --quiet -e '.[docs]'
	touch $@

clean:
	rm -rf .venv build site *.egg-info
