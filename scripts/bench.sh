#!/usr/bin/env bash
# Runs every benchmark of a build folder, one after the other; those that store something do it
# under BENCH_DIR (default: the build folder). With a second argument, JSON goes there. A benchmark
# that fails is named at the end; one without the device that it needs (status 3) is left out.
set -euo pipefail
build=${1:?usage: bench.sh BUILD_DIR [JSON_DIR]}
json=${2:-}
[ -z "$json" ] || mkdir -p "$json"
work=$(mktemp -d "${BENCH_DIR:-$build}/bench.XXXXXX")
trap 'rm -rf "$work"' EXIT
failed=()
for program in "$build"/bench/*_bench; do
  name=$(basename "$program")
  echo "== $name"
  args=()
  help=$("$program" --help 2>&1 || true)
  if [[ $help == *--dir* ]]; then
    mkdir "$work/$name"
    args+=(--dir "$work/$name")
  fi
  [ -z "$json" ] || args+=(--json "$json/$name.json")
  status=0
  "$program" "${args[@]}" || status=$?
  [ "$status" = 0 ] || [ "$status" = 3 ] || failed+=("$name")
  rm -rf "${work:?}/$name"
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
