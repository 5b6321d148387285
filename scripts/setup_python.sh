#!/usr/bin/env bash
# Makes .venv and keeps it up to date:
#   setup_python.sh core    what the extension module and the package's core are built and tested with
#   setup_python.sh models  the same, and what makes checkpoints of the small real models
#   setup_python.sh torch   the same, and PyTorch and Transformers: the splice, training, evaluation
# PyTorch's wheels on PyPI bring CUDA's libraries: 3 GB to fetch, 6 GB on the disk. TORCH_INDEX=URL
# takes torch from an index that has a smaller build (a CPU one is enough).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
what=${1:?usage: setup_python.sh core|models|torch}
venv=$root/.venv
python=/usr/bin/python3
[ -x "$python" ] || python=python3

# Installs a list once; `from` holds further options of pip.
install() {
  local list=$root/python/requirements-$1.txt stamp=$venv/$1.sha256 want
  shift
  want=$(sha256sum <"$list")
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then return; fi
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  "$venv/bin/pip" install -q --disable-pip-version-check --progress-bar off "$@" -r "$list"
  printf '%s\n' "$want" >"$stamp"
}

install core
if [ "$what" != core ]; then install models; fi
if [ "$what" = torch ]; then
  if [ -n "${TORCH_INDEX:-}" ]; then
    # An index of one's own may have builds of the pinned version with a local version (+cpu).
    pinned=$(sed -n 's/^torch==//p' "$root/python/requirements-torch.txt")
    "$venv/bin/pip" install -q --disable-pip-version-check --progress-bar off \
      --index-url "$TORCH_INDEX" "torch==$pinned"
  fi
  install torch
fi
