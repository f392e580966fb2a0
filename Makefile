# Every target makes .venv on first use and installs what it needs, once.
PYTHON ?= python3
BIN    := .venv/bin
RUFF   := ruff==0.17.4

.PHONY: demo test test-scripts test-modules lint bench clean

demo: .venv/.installed
	rm -rf runs/demo
	$(BIN)/python train_flow.py --objective matching --field transformer --blocks 1 \
	  --hidden 64,64,64 --coupling none --optimizer muon --lr 2e-3 --schedule one-cycle \
	  --ema 0.99 --tolerance 1e-3 --test-sets 200 --minutes 1.5 --out runs/demo

# A test has one thread, so two processes share them: the scripts' tests, and all others.
SCRIPTS := tests/test_train_*.py tests/test_readme.py

test: .venv/.installed lint
	@$(MAKE) --no-print-directory -j2 test-scripts test-modules

test-scripts:
	$(BIN)/python -m pytest $(SCRIPTS)

test-modules:
	$(BIN)/python -m pytest $(addprefix --ignore-glob=,$(SCRIPTS))

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: .venv/.bench
	@for b in solvers controller fields data sampling steps viewer; do echo "== $$b"; $(BIN)/python benchmarks/$$b.py || exit 1; done

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
