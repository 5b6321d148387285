#!/usr/bin/env bash
# Runs one stage of a longer task: prints one line with its time, and its output only when it fails.
#   stage.sh NAME COMMAND...         all output goes to build/logs/NAME.log
#   stage.sh --show NAME COMMAND...  shows the output as it comes (for what a person waits to read)
# On a terminal it shows the last line of that output meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
show=0
[ "$1" != --show ] || { show=1; shift; }
name=$1
shift
mkdir -p build/logs
log=build/logs/${name//[^A-Za-z0-9]/-}.log
started=$SECONDS
spent() { printf '%d:%02d' $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)); }

if [ "$show" = 1 ]; then
  printf '== %s\n' "$name"
  "$@" || { status=$?; printf '== %s: FAILED after %s (status %d)\n' "$name" "$(spent)" "$status" >&2; exit "$status"; }
  printf '== %-44s %7s\n' "$name" "$(spent)"
  exit 0
fi

"$@" >"$log" 2>&1 </dev/null &
pid=$!
trap 'kill "$pid" 2>/dev/null || true' INT TERM
if [ -t 1 ]; then
  columns=$(tput cols 2>/dev/null || echo 80)
  while kill -0 "$pid" 2>/dev/null; do
    last=$(tail -c 400 "$log" 2>/dev/null | tr '\r' '\n' | tail -n 1 | tr -cd '[:print:]')
    line="$name $(spent)  $last"
    printf '\r\033[K%s' "${line:0:$((columns - 1))}"
    sleep 0.5
  done
  printf '\r\033[K'
fi
status=0
wait "$pid" || status=$?
if [ "$status" -ne 0 ]; then
  printf '== %s: FAILED after %s (status %d); the end of %s:\n' "$name" "$(spent)" "$status" "$log" >&2
  # The first failing command's messages come before ninja's later lines.
  grep -nE '(FAILED:|error:|Error|\*\*\*Failed|[0-9]+ failed)' "$log" | head -n 20 >&2 || true
  tail -n 60 "$log" >&2
  exit "$status"
fi
# The summary is the count that a test runner prints.
summary=$(grep -E '(tests passed, [0-9]+ tests failed|^[0-9]+ passed|Success: no issues)' "$log" | tail -n 1 || true)
printf '== %-44s %7s\n' "$name" "$(spent)"
[ -z "$summary" ] || printf '%s\n' "$summary"
