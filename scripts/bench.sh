#!/usr/bin/env bash
# Runs every benchmark of a build folder, one after the other. With a second argument, JSON goes there.
set -euo pipefail
build=${1:?usage: bench.sh BUILD_DIR [JSON_DIR]}
json=${2:-}
[ -z "$json" ] || mkdir -p "$json"
for program in "$build"/bench/*_bench; do
  name=$(basename "$program")
  echo "== $name"
  if [ -n "$json" ]; then "$program" --json "$json/$name.json"; else "$program"; fi
done
