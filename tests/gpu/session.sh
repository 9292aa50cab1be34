#!/usr/bin/env bash
# One stretch of work on a bare CUDA machine, from the project's root: tests/gpu/session.sh PHASE[=SECONDS]...
#
#   install    wheels of .whl into $SITE, kernels that were compiled elsewhere; what the machine has
#   smoke      FlashInfer's kernels compiled, all at once; then each kernel by itself against torch
#   tests      tests/gpu without what smoke has run
#   together   all of tests/gpu, most files side by side; fa3 is compiled meanwhile, and comes last if it is ready
#   benchmark  benchmark/gpu/offline.py, with what $BENCHMARK adds
#   experts    benchmark/gpu/experts.py
#   serve      benchmark/gpu/serve_http.py, into $OUT/serve
#
# Each phase has a limit in seconds, writes $OUT/PHASE.log, and runs although one before it failed. What it leaves is
# written before the limit kills it: JUnit files, raw.json. A test that takes the whole process or the device with it
# costs the tests of its own file; the other files go on. Exit status: 0, or 1 if any phase failed.
# tests/gpu/README.md says what to carry there, and in which order to call this.
set -uo pipefail

declare -A limits=([install]=60 [smoke]=500 [tests]=560 [together]=400 [benchmark]=540 [experts]=200 [serve]=540)
export OUT=${OUT:-$PWD/gpu-session}
export SITE=${SITE:-/tmp/site}
export PYTHONPATH="$PWD/python:$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-/tmp/flashinfer}
export FLASHINFER_CUDA_ARCH_LIST=${FLASHINFER_CUDA_ARCH_LIST:-9.0a}
mkdir -p "$OUT" "$FLASHINFER_WORKSPACE_BASE"

# nvcc and ninja may lie beside python, or in the toolkit's folder, without being on PATH.
PATH="$(dirname "$(command -v python3)"):$SITE/bin:$PATH:/usr/local/cuda/bin"
if [[ -z ${CUDA_HOME:-} ]] && nvcc=$(command -v nvcc); then
  CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
fi
export PATH CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}

. tests/gpu/link_names.sh "$FLASHINFER_WORKSPACE_BASE/link"

install() {
  nvidia-smi
  echo "nvcc: $(command -v nvcc), CUDA_HOME=$CUDA_HOME"; nvcc --version | tail -2
  if [[ ! -e $SITE/.installed ]]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl \
      && touch "$SITE/.installed" || return
  fi
  if [[ -e .whl/kernels.tar.gz ]]; then python3 -c "
from pathlib import Path
from tests.gpu.flashinfer_kernels import take
take(Path('.whl/kernels.tar.gz'))"; fi
  python3 -m pip list 2>/dev/null \
    | grep -iE '^(torch|triton|transformers|tokenizers|safetensors|numpy|flashinfer.*|apache-tvm-ffi|pytest.*) '
  python3 -m minisgl doctor
}

smoke() {
  local failed=0
  timeout --signal INT $((limit * 3 / 5)) python3 tests/gpu/flashinfer_kernels.py || failed=1
  pack_kernels || failed=1
  some_tests smoke tests/gpu/test_gpu_kernels.py || failed=1
  return $failed
}

tests() {
  mapfile -t files < <(ls tests/gpu/test_gpu_*.py | grep -v test_gpu_kernels)
  some_tests tests "${files[@]}"
}

# What this machine compiled: the rest is where it came from.
pack_kernels() {
  (cd "$FLASHINFER_WORKSPACE_BASE" && find . -name '*.so' -path '*cached_ops*' -print0 \
    | tar --null -T - -czf - | split -b 15M - "$OUT/kernels.tar.gz.")
}

# Files whose tests take little of the device's memory share it; those that measure or fill it come after, alone.
together() {
  local failed=0 name began=() more=()
  MAX_JOBS=10 setsid nice -n 19 python3 tests/gpu/flashinfer_kernels.py > "$OUT/fa3.txt" 2>&1 &
  local compiler=$!
  for name in kernels attention=3 graphs=2 models scheduling experts=4 pieces tp server; do
    more=(-k "not fa3")
    [[ $name == *=* ]] && more+=(-n "${name#*=}")
    name=${name%=*}
    some_tests "$name" "tests/gpu/test_gpu_$name.py" > "$OUT/$name.txt" 2>&1 &
    began+=("$name=$!")
  done
  more=()
  for name in "${began[@]}"; do
    wait "${name#*=}" || failed=1
    echo "== ${name%=*}, $SECONDS s"; grep -vE ' PASSED |PASSED$|^SKIPPED|^$' "$OUT/${name%=*}.txt" | tail -60
  done
  some_tests failures tests/gpu/test_gpu_failures.py || failed=1
  some_tests big tests/gpu/test_gpu_big.py || failed=1
  if [[ -d /proc/$compiler ]]; then
    echo "== fa3 is not compiled after $SECONDS s"
    kill -- "-$compiler"
  else
    cat "$OUT/fa3.txt"
    more=(-k fa3)
    some_tests fa3 tests/gpu/test_gpu_kernels.py tests/gpu/test_gpu_attention.py || failed=1
    pack_kernels
  fi
  return $failed
}

# Name, files of tests; `more`: further arguments. If a process ended by a signal or by a broken device, the files after
# its last have another.
some_tests() {
  local name=$1 left=("${@:2}") failed=0 run=0 status seen
  while ((${#left[@]})); do
    run=$((run + 1))
    # ends between two tests when the phase's time is nearly over: an interrupt may find the process deaf, and does find
    # those in the background so
    timeout --kill-after 5 $((limit - SECONDS - 5)) \
      python3 -m pytest "${left[@]}" ${more[@]+"${more[@]}"} -vv -rs \
      -o timeout=150 -o session_timeout=$((limit - SECONDS - 25)) \
      --durations=15 --junitxml "$OUT/$name.$run.xml" 2>&1 \
      | tee -i "$OUT/$name.run"
    status=${PIPESTATUS[0]}
    seen=$(grep -oE '^tests/gpu/test_[a-z_]*\.py' "$OUT/$name.run" | sort -u)
    rm -f "$OUT/$name.run"
    ((status)) && failed=1
    [[ -z $seen ]] || ((status <= 2)) && break  # all passed, some failed, interrupted
    mapfile -t left < <(printf '%s\n' "${left[@]}" | grep -vF "$seen")
    echo "== ended with status $status; still to come: ${left[*]:-nothing}"
  done
  return $failed
}

benchmark() { python3 benchmark/gpu/offline.py --seconds $((limit - 40)) --trace --out "$OUT" ${BENCHMARK:-}; }

experts() { python3 benchmark/gpu/experts.py --seconds $((limit - 60)) --sweep --out "$OUT"; }

serve() { python3 benchmark/gpu/serve_http.py --seconds $((limit - 60)) --out "$OUT/serve"; }

for word in "$@"; do
  if [[ -z ${limits[${word%%=*}]:-} ]]; then
    echo "session.sh: ${word%%=*}: choose from ${!limits[*]}" >&2
    exit 2
  fi
done
declare -A results
failed=0
for word in "$@"; do
  phase=${word%%=*} seconds=${limits[${word%%=*}]}
  [[ $word == *=* ]] && seconds=${word#*=}
  export limit=$seconds
  export -f install smoke pack_kernels tests together some_tests benchmark experts serve
  began=$SECONDS
  # an interrupt, as from a terminal: pytest and the benchmark write what they have; then the end
  timeout --signal INT --kill-after 20 "$seconds" bash -c "$phase" 2>&1 | tee "$OUT/$phase.log" | grep -vE ' PASSED '
  status=${PIPESTATUS[0]}
  results[$phase]="status $status, $((SECONDS - began)) of $seconds s"
  ((status)) && failed=1
done
# Only so many files come back from some machines.
if (($(find "$OUT" -type f | wc -l) > 8)); then
  (cd "$OUT" && tar -czf logs.tar.gz ./*.log ./*.xml ./*.txt && rm -f ./*.log ./*.xml ./*.txt)
fi
for word in "$@"; do echo "== ${word%%=*}: ${results[${word%%=*}]}"; done
exit $failed
