# Every target makes .venv on first use and installs what it needs, once.
PYTHON ?= python3
BIN    := .venv/bin
RUFF   := ruff==0.17.4

.PHONY: demo test lint bench clean

demo: .venv/.installed
	@echo "exnode: the demo arrives with train_flow.py: it will train a set flow on built-in"
	@echo "point sets for about two minutes and draw what it learned."

test: .venv/.installed lint
	$(BIN)/python -m pytest

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: .venv/.bench
	@for b in solvers fields data; do echo "== $$b"; $(BIN)/python benchmarks/$$b.py || exit 1; done

.venv/.installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	@touch $@

.venv/.lint: .venv/.installed Makefile
	$(BIN)/python -m pip install --quiet $(RUFF)
	@touch $@

.venv/.bench: .venv/.installed requirements-bench.txt
	$(BIN)/python -m pip install --quiet -r requirements-bench.txt
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
