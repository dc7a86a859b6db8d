# The two commands to know are `make demo` and `make test`. Each sets up everything it needs in .venv.
PY := .venv/bin/python

.PHONY: demo test check format bench matrix clean

demo: .venv/.ready
	$(PY) examples/demo.py

test: .venv/.ready
	$(PY) -m pytest -q

check: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports --no-logo
	.venv/bin/mypy

format: .venv/.ready
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

bench: .venv/.ready
	$(PY) -m benchmarks.conv

matrix: .venv/.ready  # rewrite the support matrix in the README from a full test run
	$(PY) -m pytest -q tests/ops --write-matrix

.venv/.ready: pyproject.toml scripts/setup
	sh scripts/setup

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
