#!/usr/bin/env bash
# Makes .venv with the pinned packages of python/requirements.txt, for training and the Python
# tests. Does nothing when it is up to date.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv
stamp=$venv/requirements.sha256
python=/usr/bin/python3
[ -x "$python" ] || python=python3

want=$(sha256sum <"$root/python/requirements.txt")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi
echo "setup: creating .venv with the packages of python/requirements.txt (PyTorch is large)"
"$python" -m venv "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check -r "$root/python/requirements.txt"
printf '%s\n' "$want" >"$stamp"
