#!/usr/bin/env bash
# Everything that needs a GPU, in one command: the device tests, again under compute-sanitizer, and
# the GPU benchmarks. Needs a compiler, CMake and the CUDA Toolkit; PyTorch for one comparison.
#
#   bench/gpu_all.sh [RESULTS_DIR]
#
# Writes JSON and logs to RESULTS_DIR (default build/gpu-results) and says at its end what passed.
# Without a device it builds, says so, and ends with status 3.
set -uo pipefail
cd "$(dirname "$0")/.."
results=$(mkdir -p "${1:-build/gpu-results}" && cd "${1:-build/gpu-results}" && pwd)
build=build/gpu-only
jobs=$(nproc)

# One machine-code version, of the device at hand; without one the build's default.
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d '.')
echo "== build (${capability:-no device: default architecture})"
cmake --preset gpu-only ${capability:+-DCMAKE_CUDA_ARCHITECTURES=$capability} >"$results/build.log" 2>&1 &&
  cmake --build --preset gpu-only -j "$jobs" >>"$results/build.log" 2>&1 ||
  { tail -20 "$results/build.log"; echo "the build failed: see $results/build.log"; exit 1; }

failed=()
run() {  # run NAME COMMAND...: output to a log of that name
  local name=$1
  shift
  echo "== $name"
  if "$@" >"$results/$name.log" 2>&1; then
    tail -3 "$results/$name.log"
  else
    failed+=("$name")
    tail -20 "$results/$name.log"
  fi
}

run tests ctest --test-dir "$build" --output-on-failure
if [ -z "$capability" ]; then
  echo "no device: nothing of the rest can be run here"
  [ ${#failed[@]} -eq 0 ] || echo "failed: ${failed[*]}"
  exit 3
fi

device_tests=("$build"/tests/gpu/gpu_device_*_test "$build"/tests/gpu/gpu_host_register_test)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ -x "$sanitizer" ]; then
  for tool in memcheck racecheck synccheck initcheck; do
    for test in "${device_tests[@]}"; do
      # The default seeds: the same cases under every tool.
      run "$tool-$(basename "$test")" "$sanitizer" --tool "$tool" --error-exitcode 9 "$test"
    done
  done
else
  echo "compute-sanitizer was not found: not run"
  failed+=("compute-sanitizer (not found)")
fi

for bench in gpu_step_bench gpu_scan_bench; do
  run "$bench" "$build/bench/$bench" --json "$results/$bench.json"
done
run gpu_compare python3 bench/gpu_compare.py --step "$results/gpu_step_bench.json" \
  --json "$results/gpu_compare.json"
nvidia-smi >"$results/device.txt" 2>&1

echo
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]} (logs in $results)"
  exit 1
fi
echo "all passed; figures in $results/*.json"
