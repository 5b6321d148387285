#!/usr/bin/env bash
# Runs the fuzz targets of build/fuzz, as many at a time as there are cores. Targets for bytes that
# a damaged disk or a stranger's file gives a store (headers, footers, catalogue values,
# safetensors) run for FUZZ_SECONDS (60) each, the others for a sixth of it. With FUZZ_RUNS=N each
# runs until it has N executions over any number of calls: stop it and start it again. Inputs that
# reached new code are kept in build/fuzz/corpus beside the count of executions (remove that folder
# to begin anew). Inputs that break a target are kept in build/fuzz/findings and fail the run;
# `build/fuzz/tests/fuzz/fuzz_TARGET FILE` repeats the failure. With PREFIXD_SEED a run from an empty
# corpus makes the same inputs each time.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/build/fuzz
seconds=${FUZZ_SECONDS:-60}
runs=${FUZZ_RUNS:-0}
slice=2000000  # executions between two entries in the books
long=" records safetensors segment_footer segment_header "
# These options save half of the time, which stacks of allocations and fresh pages for a quarantine
# of 256 MB took.
export ASAN_OPTIONS=${ASAN_OPTIONS:-malloc_context_size=4:quarantine_size_mb=8:detect_stack_use_after_return=0}

# Runs one libFuzzer process and prints "executions seconds".
once() {
  local target=$1 log=$root/logs/$1.log
  shift
  local started=$SECONDS seed=0  # 0: libFuzzer draws one
  [ -z "${PREFIXD_SEED:-}" ] || seed=$(((PREFIXD_SEED + done) % 4294967295 + 1))
  if ! "$root/tests/fuzz/fuzz_$target" "$@" -seed="$seed" -max_len=4608 -timeout=120 -rss_limit_mb=2048 \
      -print_final_stats=1 -artifact_prefix="$root/findings/$target-" \
      "$root/corpus/$target" "$root/seeds/$target" >"$log" 2>&1; then
    echo "FAILED: $target; the input is in build/fuzz/findings. From build/fuzz/logs/$target.log:" >&2
    grep -E 'expected|ERROR|SUMMARY|runtime error|Test unit written|leak of| #[0-9]+ ' "$log" |
      cut -c1-240 | head -40 >&2
    # A checkout that is thrown away takes the input with it.
    local input
    for input in "$root/findings/$target-"*; do
      [ -f "$input" ] || continue
      echo "$(basename "$input") in base64:" >&2
      base64 "$input" | head -100 >&2
    done
    return 1
  fi
  echo "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log") $((SECONDS - started))"
}

fuzz() {
  local target=$1 total=0 spent=0 done=0 n s result
  local book=$root/corpus/$target.executions
  mkdir -p "$root/corpus/$target" "$root/findings" "$root/logs"
  [ ! -f "$book" ] || done=$(cat "$book")
  while :; do
    if [ "$runs" -gt 0 ]; then
      local left=$((runs - done))
      [ "$left" -gt 0 ] || break
      result=$(once "$target" "-runs=$((left < slice ? left : slice))") || return 1
    else
      local time=$seconds
      [[ $long == *" $target "* ]] || time=$(((seconds + 5) / 6))
      result=$(once "$target" "-max_total_time=$time") || return 1
    fi
    read -r n s <<<"$result"
    total=$((total + n)) spent=$((spent + s)) done=$((done + n))
    echo "$done" >"$book.new" && mv "$book.new" "$book"
    [ "$runs" -gt 0 ] || break
  done
  printf '%-16s %12d executions in %5d s, %8d/s, %12d in all\n' \
    "$target" "$total" "$spent" "$((total / (spent > 0 ? spent : 1)))" "$done"
}

if [ "${1:-}" = --one ]; then
  fuzz "$2"
else
  # A failing target does not stop the others; xargs then exits with 123.
  find "$root/tests/fuzz" -maxdepth 1 -name 'fuzz_*' -type f -executable ! -name fuzz_seeds \
    -printf '%f\n' | sed 's/^fuzz_//' | sort | xargs -r -n 1 -P "$(nproc)" "$0" --one
fi
