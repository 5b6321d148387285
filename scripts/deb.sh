#!/usr/bin/env bash
# Makes the Debian packages of this tree in build/deb: exports it, builds, and checks them with
# lintian.
#   deb.sh [--suffix TEXT] [--dbgsym]
# --suffix is appended to the version (0.2.0+1 is newer than 0.2.0); --dbgsym also makes packages of
# debug symbols, which takes twice as long. The package build runs no tests.
set -euo pipefail
cd "$(dirname "$0")/.."

suffix=
options="parallel=${JOBS:-$(nproc)}"
dbgsym=
while [ $# -gt 0 ]; do
  case $1 in
    --suffix) suffix=$2; shift 2 ;;
    --dbgsym) dbgsym=1; shift ;;
    *) echo "deb.sh: what is $1? See the top of this file." >&2; exit 2 ;;
  esac
done
[ -n "$dbgsym" ] || options+=" noautodbgsym"

step() { printf 'deb: %s\n' "$1"; }
# Runs a command with its output in the log, and shows the log when the command fails.
logged() {
  if ! "$@" >>"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "deb.sh: failed; all of it is in $log" >&2
    exit 1
  fi
}

scripts/setup_debian.sh packages.txt packages-deb.txt

version=$(sed -nE 's/^#define PREFIXD_VERSION "(.*)"/\1/p' include/prefixd/version.h)
soversion=$(sed -nE 's/^#define PREFIXD_SOVERSION "(.*)"/\1/p' include/prefixd/version.h)
packaged=$(dpkg-parsechangelog -l debian/changelog -S Version)
if [ "$version" != "$packaged" ]; then
  echo "deb.sh: debian/changelog is for $packaged, include/prefixd/version.h for $version" >&2
  exit 1
fi
if ! grep -qx "Package: libprefixd$soversion" debian/control; then
  echo "deb.sh: debian/control has no package libprefixd$soversion; the library's name changed" >&2
  exit 1
fi

out=$PWD/build/deb
log=$out/build.log
# Every suffix builds in the same path, so that ccache has what did not change.
work=$out/source
mkdir -p "$out"
rm -rf "$work" "$out"/prefixd_* "$out"/lib*.deb "$out"/*.changes
: >"$log"

step "export the tree"
mkdir "$work"
commit=
if commit=$(git describe --always --dirty=' with changes' --exclude='*' 2>/dev/null); then
  # The export holds the files that git has or would add, as they are now; git also lists deleted
  # files.
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do
      if [ -e "$file" ] || [ -L "$file" ]; then printf '%s\0' "$file"; fi
    done | tar -c --null -T - | tar -x -C "$work"
else
  tar -c --exclude=./build --exclude='./build-*' --exclude=./.venv . | tar -x -C "$work"
fi
if [ -n "$suffix" ]; then
  sed -i "1s/($version)/($version$suffix)/" "$work/debian/changelog"
fi

step "build prefixd $version$suffix (log: build/deb/build.log)"
export DEB_BUILD_OPTIONS=$options PREFIXD_COMMIT=$commit
# debhelper sets another HOME, so ccache's folder is named here.
export CCACHE_DIR=${CCACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/ccache} CCACHE_BASEDIR=$work
logged env -C "$work" nice dpkg-buildpackage -us -uc
rm -rf "$work"

step "manual pages"
pages=$(mktemp -d)
trap 'rm -rf "$pages"' EXIT
for package in "$out"/*.deb; do dpkg-deb -x "$package" "$pages"; done
find "$pages/usr/share/man" -name '*.gz' -exec sh -c 'zcat "$1" | mandoc -Tlint -Wwarning' - {} \; |
  grep -v 'missing date' >"$pages/lint" || true
if [ -s "$pages/lint" ]; then
  cat "$pages/lint" >&2
  exit 1
fi

step "lintian"
root=()
[ "$(id -u)" -ne 0 ] || root=(--allow-root)
lintian "${root[@]}" --fail-on error,warning "$out"/*.changes

step "done:"
(cd "$out" && du -h --apparent-size -- *.deb *.dsc *.tar.* | sed 's/^/  /')
