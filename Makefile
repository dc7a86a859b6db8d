# The two commands to know are `make demo` and `make test`. Each sets up everything it needs in .venv.
PY := .venv/bin/python

TIMES ?= 1

.PHONY: demo test test-full test-faults test-soak test-fuzz test-torch test-networks test-ecosystem check format bench docs clean

demo: .venv/.ready
	$(PY) examples/demo.py

test: .venv/.ready  # two workers: tests of one process use one core, those of several ranks wait for messages
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test-full: .venv/.ready  # all drawn shapes, and every network under every preset on 2, 4 and 8 ranks: over an hour
	CONVMESH_TEST=full $(PY) -m pytest -q -m "full or not full"

test-faults: .venv/.ready  # two hosts on this machine, as root: about half an hour; TIMES=20 tries each fault 20 times
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "full or not full" tests/cluster
	$(PY) -m tests.cluster.matrix --times $(TIMES)

test-soak: .venv/.ready  # 100,000 tiny steps and 1,000 restarts, in which nothing may grow: hours
	OMP_NUM_THREADS=1 $(PY) -m tests.supervise.soak steps 100000
	OMP_NUM_THREADS=1 $(PY) -m tests.supervise.soak restarts 1000

test-fuzz: .venv/.ready  # files of every kind, changed at random for an hour
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz --seconds 3600

test-torch:  # the exactness core on the oldest and the newest torch, in environments of their own; VERSION=2.14: on that one
	sh scripts/test-torch $(VERSION)

test-networks:  # published networks of other packages, in a virtual environment of its own: hours on two cores
	sh scripts/test-networks

test-ecosystem:  # trainers of other packages: Lightning, accelerate, MONAI, nnU-Net, in a virtual environment of its own
	sh scripts/test-ecosystem

check: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports --no-logo
	.venv/bin/mypy

format: .venv/.ready
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

bench: .venv/.ready
	for page in conv channels unet ddp plan_scale; do $(PY) -m benchmarks.$$page || exit 1; done

docs: .venv/.ready  # rewrite the generated pages: reference, support matrix, the README's table of numbers
	$(PY) -m scripts.make_reference
	$(PY) -m scripts.make_numbers
	$(PY) -m tests.support

.venv/.ready: pyproject.toml scripts/setup
	sh scripts/setup

clean:
	rm -rf .venv .venv-torch-* .venv-networks .venv-ecosystem .mypy_cache .ruff_cache .pytest_cache .hypothesis
