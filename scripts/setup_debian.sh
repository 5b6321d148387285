#!/usr/bin/env bash
# Installs the missing Debian packages of the lists beside this file (setup_debian.sh LIST...;
# packages.txt where none is named). Does nothing when none is missing. Needs root or sudo only if
# it has to install something.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

lists=("$@")
[ $# -gt 0 ] || lists=(packages.txt)
mapfile -t wanted < <(cd "$here" && grep -hvE '^\s*(#|$)' "${lists[@]}")
missing=()
for package in "${wanted[@]}"; do
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "setup: these Debian packages are missing and neither root nor sudo is at hand: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo env DEBIAN_FRONTEND=noninteractive)
fi
echo "setup: installing ${#missing[@]} Debian packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=5 -q update
"${as_root[@]}" apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=5 -q -y --no-install-recommends install "${missing[@]}"
