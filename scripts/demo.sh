#!/usr/bin/env bash
# Runs the main job on a real document: prefill, persist, stop everything, start again, decode from
# disk under small read budgets. Writes report.json and index.html.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  cat <<'TXT'
usage: scripts/demo.sh [options]        (or: make demo DEMO_ARGS="options")

  --document FILE   UTF-8 text to use            (default: /usr/share/common-licenses/GPL-3)
  --model DIR       Hugging Face checkpoint      (default: models/prefixd-tiny)
  --tokens N        at most N tokens of prompt   (default: as many as the model is good for)
  --facts N         facts planted and asked      (default: 16)
  --continuation N  held-out tokens scored       (default: 192)
  --out DIR         where the report goes        (default: demo-report)
  --build DIR       build folder                 (default: build/release)
  --keep-store      keep the stored prompt in OUT/prefixd-demo-store
TXT
}

out=demo-report build=$root/build/release model=$root/models/prefixd-tiny keep=0
prefill_args=()
while [ $# -gt 0 ]; do
  case $1 in
    --model) model=${2:?--model needs a folder}; shift 2 ;;
    --document | --tokens | --facts | --continuation)
      [ $# -ge 2 ] || { echo "demo: $1 needs a value" >&2; exit 2; }
      prefill_args+=("$1" "$2"); shift 2 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    --build) build=${2:?--build needs a folder}; shift 2 ;;
    --keep-store) keep=1; shift ;;
    -h | --help) usage; exit 0 ;;
    *) echo "demo: unknown option '$1' (see --help)" >&2; exit 2 ;;
  esac
done

daemon=$build/bin/prefixd
demo=$build/bin/prefixd-demo
for program in "$daemon" "$demo"; do
  [ -x "$program" ] || { echo "demo: $program is missing; run 'make build' first" >&2; exit 1; }
done

mkdir -p "$out"
out=$(cd "$out" && pwd)
store=$out/prefixd-demo-store
rm -rf "$store"
# Socket paths are limited to 107 bytes, so the socket does not lie under --out.
run=$(mktemp -d /tmp/prefixd-demo.XXXXXX)
socket=$run/prefixd.sock
pid=

stop_daemon() {
  [ -n "$pid" ] || return 0
  kill -TERM "$pid" 2>/dev/null || true
  wait "$pid" || echo "demo: the daemon ended with status $?" >&2
  pid=
}
cleanup() {
  local status=$?
  stop_daemon
  [ "$keep" = 1 ] || rm -rf "$store"
  rm -rf "$run"
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

start_daemon() {  # further flags of the daemon
  "$daemon" --dir "$store" --socket "$socket" "$@" >>"$out/prefixd.log" 2>&1 &
  pid=$!
  for _ in $(seq 300); do
    [ -S "$socket" ] && return 0
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.05
  done
  echo "demo: the daemon did not start; its log is $out/prefixd.log:" >&2
  tail -n 3 "$out/prefixd.log" >&2
  exit 1
}

# The decoder and the daemon share the cores: idle OpenMP threads must not spin on them.
export OMP_WAIT_POLICY=passive

: >"$out/prefixd.log"
echo "1. The daemon starts on an empty store."
start_daemon
echo "2. A process prefills the document and persists its KV cache, then ends."
"$demo" prefill --socket "$socket" --state "$out/state.json" --model "$model" \
  "${prefill_args[@]}"
echo "3. The daemon is stopped (SIGTERM) and started again."
stop_daemon
start_daemon
echo "4. A new process attaches to the stored prompt and decodes under small budgets."
"$demo" decode --socket "$socket" --state "$out/state.json" --json "$out/report.json"
echo "5. The daemon is started once more, without host memory: the same steps with every row on the SSD."
stop_daemon
start_daemon --host-tier-mib 0
"$demo" cold --socket "$socket" --state "$out/state.json" --json "$out/report.json"
stop_daemon
python=/usr/bin/python3
[ -x "$python" ] || python=python3
"$python" "$root/demo/report.py" "$out/report.json" "$out/index.html"
echo
echo "The same with plots: $out/index.html (numbers: $out/report.json)"
