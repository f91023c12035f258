# Two commands on a fresh machine with Python and make: `make demo` and `make test`. Each makes what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: help demo test lint typecheck proto bench torture test-gpu clean

help:
	@echo "make demo       the whole loop on a small model: rollout, store, trainer, report in demo-output/"
	@echo "make test       lint, types and all tests (no GPU needed)"
	@echo "make test-gpu   kernel tests, on a machine with a CUDA device"
	@echo "make bench      data plane against its peers, one interleaved run"
	@echo "make torture    the long runs: kills, power cuts, bit flips"
	@echo "make proto      regenerate trace_store/v1 from proto/"

# An environment is made once; it is remade when pyproject.toml changes.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "install the venv module: apt-get install python3-venv"; exit 1; }
	@echo "== creating $(VENV) (once; downloads torch, takes minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q --upgrade pip
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/trace-store demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)
	$(BIN)/mypy

test: lint typecheck
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations 15

# The machine's own Python, since CuPy and a CUDA build of torch are not in the development environment.
GPU_PATH := PYTHONPATH=.:kernels:server:client
SANITIZED := (layouts and 130-48) or (rounding_equals and bfloat16 and nvfp4) or (natively and bfloat16) \
	or record_rows or sglang_pool or vllm or disguised or (discrepancy and (bfloat16 or width)) \
	or (some_of_them_native and bfloat16)
test-gpu:
	$(GPU_PATH) $(PYTHON) -m pytest -m gpu tests/kernels
	@command -v compute-sanitizer >/dev/null || exit 0; for tool in memcheck racecheck initcheck synccheck; do \
	  echo "== compute-sanitizer $$tool"; \
	  $(GPU_PATH) compute-sanitizer --tool $$tool --error-exitcode 1 $(PYTHON) -m pytest -q -m gpu \
	    tests/kernels -k "$(SANITIZED)" || exit 1; done

bench: $(STAMP)
	$(BIN)/python -m tests.bench

torture: $(STAMP)
	TRACE_STORE_TORTURE=1 $(BIN)/python -m pytest tests/torture

proto: $(STAMP)
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/protoc -I. --python_out=.. --pyi_out=.. trace_store/v1/*.proto

clean:
	rm -rf $(VENV) demo-output .mypy_cache .ruff_cache .pytest_cache
