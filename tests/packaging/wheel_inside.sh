#!/usr/bin/env bash
# wheel_test.sh runs this in the bare system.
set -euo pipefail
wheel=$1
pass() { printf 'ok    %s\n' "$*"; }
fail() { printf 'FAIL  %s\n' "$*" >&2; exit 1; }

python3 -m venv /opt/p
pip=/opt/p/bin/pip
"$pip" install -q "$wheel"
version=$(basename "$wheel" | cut -d- -f2)
packages=$("$pip" list --format=freeze | grep -vE '^(pip|setuptools|wheel)=' | tr '\n' ' ')
pass "installed: $packages"
cd /tmp
export PATH=/opt/p/bin:$PATH

# Every library of every file must be found, in the wheel or among those that any glibc system has.
site=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
files=$(find "$site/prefixd" "$site/prefixd.libs" -type f \( -name '*.so*' -o -path '*/bin/*' \))
for file in $files; do
  loaded=$(ldd "$file")
  if grep -q 'not found' <<<"$loaded"; then echo "$loaded"; fail "$file"; fi
  foreign=$(grep '=>' <<<"$loaded" | grep -v "$site/" | grep -vE \
    '/(libstdc\+\+\.so\.6|libm\.so\.6|libgcc_s\.so\.1|libc\.so\.6|libz\.so\.1|ld-linux-x86-64\.so\.2|libpthread\.so\.0|libdl\.so\.2|librt\.so\.1)( |$)' || true)
  [ -z "$foreign" ] || fail "$file also loads $foreign"
done
pass "$(wc -w <<<"$files") ELF files load what the wheel carries, the C and C++ runtime, zlib"

[ "$(prefixd --version | sed -n 1p)" = "prefixd $version" ] || fail "prefixd --version"
prefixctl --help | grep -q recover || fail "prefixctl --help"
[ "$(python -c 'import prefixd; print(prefixd.__version__)')" = "$version" ] || fail "__version__"
pass "prefixd, prefixctl and the package are of version $version"
code=0; prefixd --no-such-flag >/dev/null 2>&1 || code=$?
[ "$code" = 2 ] || fail "a wrong flag ends with $code, not 2"
code=0; prefixctl --socket /tmp/nobody status >/dev/null 2>&1 || code=$?
[ "$code" != 0 ] || fail "prefixctl without a daemon ends well"
pass "exit codes are the programs' own"

start() {
  prefixd --dir /tmp/D --socket /tmp/S --min-free-mib 0 --host-tier-mib 64 >/tmp/log 2>&1 &
  daemon=$!
  for _ in $(seq 100); do grep -q 'prefixd ready' /tmp/log && return; sleep 0.1; done
  cat /tmp/log; fail "the daemon did not start"
}
stop() {
  [ "$(readlink "/proc/$daemon/exe")" = "$site/prefixd/bin/prefixd" ] || fail "an interpreter stayed"
  kill -TERM "$daemon"
  code=0; wait "$daemon" || code=$?
  [ "$code" = 0 ] || { cat /tmp/log; fail "SIGTERM: exit code $code"; }
}
start
python /mnt/wheel_use.py put unix:/tmp/S
prefixctl --socket /tmp/S prefixes list --json | grep -q n_tokens || fail "prefixctl prefixes list"
stop
start
python /mnt/wheel_use.py attach unix:/tmp/S
stop
pass "daemon: put, restart, attached again; SIGTERM ends it with 0"
start
kill -INT "$daemon"; code=0; wait "$daemon" || code=$?
[ "$code" = 0 ] || fail "SIGINT: exit code $code"
pass "daemon: SIGINT ends it with 0"
python /mnt/wheel_use.py put /tmp/D2
python /mnt/wheel_use.py attach /tmp/D2
pass "embedded: put, another process attached and stepped"

said=$(python -c 'import prefixd.transformers' 2>&1 || true)
grep -q "pip install 'prefixd\[transformers\]'" <<<"$said" || fail "prefixd.transformers: $said"
pass "prefixd.transformers names its extra"

here=$(python -c 'import sys; print("%d%d" % sys.version_info[:2])')
platform=$(basename "$wheel" .whl | cut -d- -f5)
for target in "manylinux_2_28_x86_64 $here" "${platform/x86_64/aarch64} $here" "$platform 312"; do
  read -r other python_version <<<"$target"
  if said=$("$pip" install --platform "$other" --python-version "$python_version" \
    --only-binary=:all: --no-deps --target /tmp/x "$wheel" 2>&1); then
    fail "pip takes it for $target"
  fi
  grep -q 'is not a supported wheel on this platform' <<<"$said" || fail "$target: $said"
done
pass "pip refuses another glibc, processor or Python: ${said##*/}"
