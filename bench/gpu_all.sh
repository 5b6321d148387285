#!/usr/bin/env bash
# Runs everything that needs a GPU: the device tests, the same under compute-sanitizer, and the GPU
# benchmarks. Needs a compiler, CMake and the CUDA Toolkit; PyTorch for one comparison.
#
#   bench/gpu_all.sh [RESULTS_DIR [STAGE...]]
#
# It runs the named stages, or all of them, in this order: build, tests, memcheck, racecheck,
# synccheck, initcheck, step, scan, compare. Each can be a command of its own, for machines that are
# lent for minutes; `compare` reads what `step` wrote. JSON and logs go to RESULTS_DIR (default
# build/gpu-results). The exit status is 0 when everything passed, otherwise 1, and the last lines
# name what failed. Without a device it builds, runs the tests that need none, prints that, and ends
# with status 3.
set -uo pipefail
cd "$(dirname "$0")/.."
results=$(mkdir -p "${1:-build/gpu-results}" && cd "${1:-build/gpu-results}" && pwd)
build=build/gpu-only
jobs=$(nproc)
[ $# -gt 0 ] && shift
tools="memcheck racecheck synccheck initcheck"
all="build tests $tools step scan compare"
stages=" ${*:-$all} "
for stage in $stages; do
  [[ " $all " == *" $stage "* ]] ||
    { echo "gpu_all.sh: no stage is called '$stage'; there are: $all"; exit 2; }
done
wanted() { [[ "$stages" == *" $1 "* ]]; }

# The build has machine code for the device of this machine alone; without one the build's default.
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d '.')
if wanted build; then
  echo "== build (${capability:-no device: default architecture})"
  cmake --preset gpu-only ${capability:+-DCMAKE_CUDA_ARCHITECTURES=$capability} >"$results/build.log" 2>&1 &&
    cmake --build --preset gpu-only -j "$jobs" >>"$results/build.log" 2>&1 ||
    { tail -20 "$results/build.log"; echo "the build failed: see $results/build.log"; exit 1; }
fi

failed=()
not_run=()
run() {  # run NAME COMMAND...: output to a log of that name
  local name=$1 status
  shift
  echo "== $name"
  "$@" >"$results/$name.log" 2>&1
  status=$?
  if [ $status -eq 0 ]; then
    tail -3 "$results/$name.log"
  elif [ $status -eq 3 ]; then  # what it needs is not there
    not_run+=("$name")
    tail -3 "$results/$name.log"
  else
    failed+=("$name")
    tail -20 "$results/$name.log"
  fi
}

wanted tests && run tests ctest --test-dir "$build" --output-on-failure
if [ -z "$capability" ]; then
  echo "no device: nothing of the rest can be run here"
  [ ${#failed[@]} -eq 0 ] || echo "failed: ${failed[*]}"
  exit 3
fi

device_tests=("$build"/tests/gpu/gpu_device_*_test "$build"/tests/gpu/gpu_host_register_test)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
for tool in $tools; do
  wanted "$tool" || continue
  if [ ! -x "$sanitizer" ]; then
    echo "compute-sanitizer was not found: $tool is not run"
    failed+=("$tool (compute-sanitizer was not found)")
    continue
  fi
  for test in "${device_tests[@]}"; do
    # One seed: the same cases under every tool. A test asks for more memory than there is, and gets
    # the error that it expects: no error of the API is one of memory. What takes minutes is left out:
    # the reference of many rows, and under racecheck the cases of random shapes.
    options=()
    [ "$tool" = memcheck ] && options=(--report-api-errors no)
    filter="-*ManyRows"
    [ "$tool" = racecheck ] && filter="$filter:*RandomBatches"
    PREFIXD_SEED=1 run "$tool-$(basename "$test")" \
      "$sanitizer" --tool "$tool" "${options[@]}" --error-exitcode 9 "$test" --gtest_filter="$filter"
  done
done

for bench in step scan; do
  wanted $bench && run gpu_${bench}_bench "$build/bench/gpu_${bench}_bench" \
    --json "$results/gpu_${bench}_bench.json"
done
wanted compare && run gpu_compare python3 bench/gpu_compare.py \
  --step "$results/gpu_step_bench.json" --json "$results/gpu_compare.json"
nvidia-smi >"$results/device.txt" 2>&1

echo
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]} (logs in $results)"
  exit 1
fi
[ ${#not_run[@]} -eq 0 ] || echo "not run, for want of what they need: ${not_run[*]}"
echo "all passed; figures in $results/*.json"
