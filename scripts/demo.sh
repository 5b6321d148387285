#!/usr/bin/env bash
# Runs the main job on a real document: prefill, persist, stop everything, start again, answer from
# disk under small read budgets. Writes report.json and index.html. demo.sh --help lists the options.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=/usr/bin/python3
[ -x "$python" ] || python=python3
exec "$python" "$root/demo/story/main.py" "$@"
