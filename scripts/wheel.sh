#!/usr/bin/env bash
# Makes a wheel in build/wheels that needs NumPy and a glibc no older than this system's, and no
# other library. It contains the package, daemon, prefixctl, the embedded store, and the shared
# libraries of all of them. PYTHON names the interpreter for it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-/usr/bin/python3}
[ -x "$(command -v "$python")" ] || python=python3
jobs=${JOBS:-$(nproc)}

# The build has an environment of its own, without PyTorch and the packages of the tests.
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
env=build/wheel-env-$tag
stamp=$env/requirements.sha256
want=$(sha256sum <python/requirements-wheel.txt)
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
  "$python" -m venv --clear "$env"
  "$env/bin/pip" install -q --disable-pip-version-check -r python/requirements-wheel.txt
  printf '%s\n' "$want" >"$stamp"
fi
export PATH=$PWD/$env/bin:$PATH

raw=build/wheel-raw
rm -rf "$raw" && mkdir -p "$raw" build/wheels
CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$env/bin/pip" wheel -q --disable-pip-version-check \
  --no-build-isolation --no-deps -w "$raw" ./python

# The build is measured with one of these BLAS variants; Debian's alternatives may name another.
for variant in openblas-openmp openblas-pthread; do
  folder=/usr/lib/$(uname -m)-linux-gnu/$variant
  [ ! -d "$folder" ] || export AUDITWHEEL_LD_LIBRARY_PATH=${AUDITWHEEL_LD_LIBRARY_PATH:-$folder}
done
glibc=$(getconf GNU_LIBC_VERSION | sed 's/glibc //; s/\./_/')
rm -rf "$raw/repaired"
auditwheel repair --plat "manylinux_${glibc}_$(uname -m)" --only-plat \
  -w "$raw/repaired" "$raw"/prefixd-*.whl >"$raw/auditwheel.log" 2>&1 ||
  { cat "$raw/auditwheel.log" >&2; exit 1; }
rm -f build/wheels/prefixd-*-"$tag"-*.whl  # of other versions: there is one to install
python scripts/wheel_finish.py "$raw"/repaired/prefixd-*.whl build/wheels
