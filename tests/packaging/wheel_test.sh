#!/usr/bin/env bash
# Installs a wheel into a Debian with nothing but Python and uses all of it. Needs root and
# debootstrap; NumPy comes from the index that this machine's pip uses.
#
#   tests/packaging/wheel_test.sh WHEEL [SUITE]       SUITE: bookworm, trixie
#
# DEBIAN_MIRROR names another mirror than debootstrap's. The bare system is kept in
# build/wheel-test; each run works on a copy.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
wheel=$(realpath "$1")
suite=${2:-bookworm}
work=$(realpath "$here/../..")/build/wheel-test
bare=$work/$suite

if [ ! -f "$bare/complete" ]; then
  rm -rf "$bare" && mkdir -p "$work"
  nice debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$bare" \
    ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$work/debootstrap.log" 2>&1 ||
    { tail -5 "$work/debootstrap.log" >&2; exit 1; }
  touch "$bare/complete"
fi

root=$(mktemp -d "$work/run.XXXXXX")
trap 'rm -rf --one-file-system "$root"' EXIT
cp -a --reflink=auto "$bare/." "$root"
# The bare system reaches the package index in the way that this machine does.
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
[ ! -f /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"
certificates=/etc/ssl/certs/ca-certificates.crt
[ ! -f "$certificates" ] || install -D "$certificates" "$root$certificates"
cp "$wheel" "$here/wheel_inside.sh" "$here/wheel_use.py" "$root/mnt/"

# Mounts and processes are in namespaces of their own, so that none outlives the test.
# shellcheck disable=SC2016
unshare --mount --pid --fork bash -euc '
  mount -t proc proc "$1/proc"
  mount -t tmpfs tmpfs "$1/tmp"
  exec chroot "$1" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
    HOME=/root PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    bash /mnt/wheel_inside.sh "/mnt/$2"
' bash "$root" "$(basename "$wheel")"
