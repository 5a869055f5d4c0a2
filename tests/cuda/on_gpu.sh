#!/usr/bin/env bash
# Builds the CUDA library and runs every check of it that needs no snakemake, on a machine with a GPU:
#   tests/cuda/on_gpu.sh OUT [stage …]      stages: build checks decode device parity measure experts bench
#                                           repeats mutations faults sanitize
# Records (JSON) and logs go to OUT; a table is printed last. `decode` and `faults` want results/bundles and
# results/golden. Exit status 1 if a stage failed.
set -euo pipefail
cd "$(dirname "$0")/../.."
fail() {
  echo "error: $1" >&2
  exit 2
}
[ $# -gt 0 ] || fail "OUT: missing: tests/cuda/on_gpu.sh OUT [stage …]"
nvidia-smi -L >/dev/null 2>&1 || fail "nvidia-smi: no GPU answers: this script runs on one"
OUT=$(mkdir -p "$1" && cd "$1" && pwd)
shift
ALL_STAGES="build checks decode device parity measure experts bench repeats mutations faults sanitize"
STAGES=${*:-$ALL_STAGES}
for stage in $STAGES; do [[ " $ALL_STAGES " = *" $stage "* ]] || fail "stage: $stage: must be one of: $ALL_STAGES"; done
PYTHON=${PYTHON:-python3}
ARCHS=${ARCHS:-90a}
BUILD=results/build/on_gpu  # beside the ladder's, which has code for other GPUs too
LIBRARY=$BUILD/libkdtree_cuda.so
JOBS=$(nproc)
RUNGS=${RUNGS:-plain stream}  # of the matrix kernels, which only bf16 activations tell apart
ALL_OPERATORS=$(cd engine/ops && ls -d */op.h | sed 's|/op.h||')
OPERATORS=${OPERATORS:-$ALL_OPERATORS}  # to check
mkdir -p "$BUILD"/{backend,tests,racecheck} "$OUT"/{checks,repeats,decode,logs}
CXX="-std=c++17 -O3 -fPIC -fopenmp -ffp-contract=off -DNDEBUG -Wall -Wextra -Wno-psabi"
NVCC="-std=c++17 -O3 --fmad=false -DNDEBUG -Xcompiler -fPIC,-Wall,-Wextra -Xptxas -v"
for arch in $ARCHS; do NVCC+=" -gencode arch=compute_$arch,code=sm_$arch"; done

# Runs the commands on stdin, one a line, in parallel; a line that fails or takes longer than LIMIT seconds is named.
parallel() { xargs -P "$JOBS" -I{} timeout "${LIMIT:-150}" bash -c '{} || { echo "FAILED: {}"; exit 1; }'; }

# The commands that compile the operators into a folder, with logs in another, and flags; and the library of the objects.
operators_into() {
  for op in $ALL_OPERATORS; do
    echo "nvcc $NVCC ${*:3} -c engine/ops/$op/cuda.cu -o $1/$op.o > $2/$op.ptxas 2>&1"
  done
}
link_in() {
  nvcc -shared -Xcompiler -fopenmp -o "$1/libkdtree_cuda.so" $(for op in $ALL_OPERATORS; do echo $1/$op.o; done) \
    $BUILD/backend/*.o $BUILD/*cpp.o
}

build() {
  {
    operators_into $BUILD "$OUT/logs"
    for source in engine/backend/cuda/*.cu; do
      echo "nvcc $NVCC -c $source -o $BUILD/backend/$(basename "$source").o > $OUT/logs/$(basename "$source").ptxas 2>&1"
    done
    for source in engine/backend/cuda/*.cpp engine/core/*.cpp; do
      echo "g++ $CXX -c $source -o $BUILD/${source//\//_}.o"
    done
    for program in device measure_tree measure_ops; do
      echo "nvcc -std=c++17 -O1 -c tests/cuda/$program.cpp -o $BUILD/tests/$program.o"
    done
    echo "nvcc $NVCC tests/cuda/check_experts.cu -o $BUILD/check_experts > $OUT/logs/check_experts.ptxas 2>&1"
    echo "nvcc $NVCC -shared engine/bench_cuda/probes.cu -o $BUILD/libprobes_cuda.so > $OUT/logs/probes.ptxas 2>&1"
    echo "$PYTHON tests/cuda/mma_parity.py --build $BUILD/mma_parity --output /dev/null --compile-only"
  } | parallel || return 1
  link_in $BUILD || return 1
  for program in device measure_tree measure_ops; do
    nvcc -o $BUILD/$program $BUILD/tests/$program.o $LIBRARY || return 1  # found by this path, from here
  done
  grep -h -A2 -E "Compiling" "$OUT"/logs/*.ptxas | grep -E "spill|stack" | sort | uniq -c || true
}

checks() {
  for rung in $RUNGS; do
    for op in $OPERATORS; do
      echo "KDTREE_CUDA=$rung $PYTHON -m engine.check --library $LIBRARY --operator $op" \
        "--output $OUT/checks/$op.$rung.json > $OUT/logs/$op.$rung.check 2>&1"
    done
  done | parallel
}

decode() {
  for bundle in results/bundles/*.safetensors; do
    local name
    name=$(basename "$bundle" .safetensors)
    for run in "plain float32" "plain bfloat16" "stream bfloat16"; do
      read -r rung activations <<< "$run"
      echo "KDTREE_CUDA=$rung $PYTHON -m tests.cuda.decode --library $LIBRARY --bundle $bundle" \
        "--golden results/golden/$name.safetensors --activations $activations" \
        "--output $OUT/decode/$name.$activations.$rung.json > $OUT/logs/$name.$activations.$rung.decode 2>&1"
    done
  done | parallel
}

device() {
  local status=0
  for rung in $RUNGS; do KDTREE_CUDA=$rung timeout 120 $BUILD/device "$OUT/checks/device.$rung.json" || status=1; done
  return $status
}
parity() { $PYTHON tests/cuda/mma_parity.py --build $BUILD/mma_parity --output "$OUT/checks/mma_parity.json"; }
measure() {
  timeout 60 $BUILD/measure_tree "$OUT/tree.json"
  for rung in $RUNGS; do KDTREE_CUDA=$rung timeout 100 $BUILD/measure_ops "$OUT/operators.$rung.json"; done
}
experts() { KDTREE_CUDA=stream timeout 100 $BUILD/check_experts "$OUT/checks/experts_at_k2_size.json"; }
bench() {
  timeout 400 $PYTHON -m engine.bench_cuda --library $LIBRARY --probes $BUILD/libprobes_cuda.so --output "$OUT/cuda.json"
}
mutations() {
  $PYTHON -m tests.cuda.mutations --build $BUILD --arch "${ARCHS%% *}" --output "$OUT/checks/mutations.json" \
    --only "${MUTATIONS:-}"
}

faults() {
  local bundle
  bundle=$(ls results/bundles/int4*.safetensors 2>/dev/null | head -1) || true
  [ -n "$bundle" ] || { echo "faults: results/bundles: holds no int4*.safetensors" && return 1; }
  $PYTHON -m tests.cuda.faults --build $BUILD --bundle "$bundle" --golden "results/golden/$(basename "$bundle")" \
    --arch "${ARCHS%% *}" --output "$OUT/checks/faults.json"
}

repeats() {
  for rung in $RUNGS; do
    for op in $OPERATORS; do
      echo "KDTREE_CUDA=$rung $PYTHON -m tests.cuda.repeats --library $LIBRARY --operator $op" \
        "--output $OUT/repeats/$op.$rung.json > $OUT/logs/$op.$rung.repeats 2>&1"
    done
  done | parallel
}

sanitize() {
  operators_into $BUILD/racecheck $BUILD/racecheck -DKDTREE_ARRIVALS_OF_A_WARP=32 | parallel || return 1  # see stream.cuh
  link_in $BUILD/racecheck || return 1
  local tool rung op library status=0
  for tool in memcheck racecheck initcheck "synccheck --num-cuda-barriers 65536"; do
    library=$LIBRARY
    [ "$tool" = racecheck ] && library=$BUILD/racecheck/libkdtree_cuda.so
    for rung in $RUNGS; do
      for op in $OPERATORS; do
        echo "KDTREE_CUDA=$rung compute-sanitizer --tool $tool --error-exitcode 9 $PYTHON -m engine.check" \
          "--library $library --operator $op --output $OUT/logs/sanitize.${tool%% *}.$op.$rung.json" \
          "> $OUT/logs/$op.$rung.${tool%% *} 2>&1; echo ${tool%% *} $op $rung \$? >> $OUT/sanitize.txt"
      done
    done
  done | parallel || status=1  # one did not end in time
  sort "$OUT/sanitize.txt"
  grep -qv " 0$" "$OUT/sanitize.txt" && status=1
  return $status
}

rm -f "$OUT/sanitize.txt"
status=0
for stage in $STAGES; do
  begin=$(date +%s)
  $stage || { echo "stage $stage FAILED" && status=1; }
  echo "stage $stage: $(($(date +%s) - begin)) s"
done
$PYTHON tests/cuda/table.py "$OUT" || status=1
exit $status
