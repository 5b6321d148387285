#!/usr/bin/env bash
# Tests the Debian packages in a fresh Debian 12: installed, used, upgraded, removed, purged. Needs
# root and the package mirror of this machine's apt, and takes minutes; `make test` does not run it.
#   deb_test.sh            builds the packages twice (scripts/deb.sh); everything is below build/deb-test
#   DEB_TEST_REUSE=1       takes the packages of the run before
#   DEB_TEST_BOOT=0        does not boot the fresh system (systemd-nspawn) to test the unit there
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "$(id -u)" -eq 0 ] || { echo "deb_test: needs root for debootstrap and chroot" >&2; exit 1; }

work=$PWD/build/deb-test
root=$work/root
base=$work/base.tar
mkdir -p "$work"

step() { printf 'deb_test: %s\n' "$1"; }
fail() { echo "deb_test: FAILED: $1" >&2; exit 1; }
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
  DEBIAN_FRONTEND=noninteractive ${http_proxy:+http_proxy="$http_proxy"} \
  ${https_proxy:+https_proxy="$https_proxy"} "$@"; }
# Runs a command as an ordinary user with the user's groups.
as() { local user=$1; shift; inside setpriv --reuid "$user" --regid "$user" --init-groups "$@"; }
install_quietly() { inside apt-get -q -y --no-install-recommends install "$@" >>"$work/apt.log" 2>&1 ||
  { tail -n 30 "$work/apt.log" >&2; fail "apt-get install $*"; }; }

daemon=
mount_system() {
  mount -t proc proc "$root/proc"
  mount --bind /dev "$root/dev"
  mount -t tmpfs tmpfs "$root/dev/shm"
}
unmount_system() {
  for mounted in dev/shm dev proc; do
    if mountpoint -q "$root/$mounted"; then umount -l "$root/$mounted"; fi
  done
}
clean_up() {
  [ -z "$daemon" ] || kill -9 "$daemon" 2>/dev/null || true
  unmount_system
}
trap clean_up EXIT
unmount_system  # of a run that was killed

# --- packages ------------------------------------------------------------------------------------
step "build the packages, and the same with a higher version"
if [ "${DEB_TEST_REUSE:-}" != 1 ]; then
  rm -rf "$work/old" "$work/new"
  scripts/deb.sh --suffix +1 >"$work/build-new.log" || { cat "$work/build-new.log" >&2; exit 1; }
  cp -r build/deb "$work/new"
  scripts/deb.sh >"$work/build-old.log" || { cat "$work/build-old.log" >&2; exit 1; }
  cp -r build/deb "$work/old"
fi
version=$(dpkg-deb -f "$work"/old/prefixd_*.deb Version)
[ "$(dpkg-deb -f "$work"/new/prefixd_*.deb Version)" = "$version+1" ] || fail "no version $version+1"

# --- a fresh system ------------------------------------------------------------------------------
# apt reports its sources, so that the fresh system uses this machine's mirror.
sources=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Identifier: Packages' |
  grep '^bookworm' | sort -u)
if [ ! -e "$base" ]; then
  step "debootstrap"
  rm -rf "$root"
  debootstrap --variant=minbase bookworm "$root" "$(awk '$1 == "bookworm" { print $2; exit }' <<<"$sources")" \
    >"$work/debootstrap.log"
  awk '{ print "deb " $2 " " $1 " main" }' <<<"$sources" >"$root/etc/apt/sources.list"
  apt-config dump | grep -E '^Acquire::(https?|.*[Pp]roxy)' >"$root/etc/apt/apt.conf.d/90host" || true
  tar -C "$root" -cf "$base" .
else
  step "the fresh system of an earlier run"
  rm -rf "$root" && mkdir -p "$root" && tar -C "$root" -xf "$base"
fi
cp /etc/resolv.conf "$root/etc/resolv.conf"
mount_system
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"  # no init here that could start services
chmod +x "$root/usr/sbin/policy-rc.d"
: >"$work/apt.log"
inside apt-get -q update >>"$work/apt.log" 2>&1 || fail "apt-get update, see $work/apt.log"
inside find / -xdev -path /proc -prune -o -path /dev -prune -o -path /root -prune -o -print |
  sort >"$work/files-before"

# --- installed and used --------------------------------------------------------------------------
step "install"
mkdir "$root/root/old" "$root/root/new"
cp "$work"/old/*.deb "$root/root/old/" && cp "$work"/new/*.deb "$root/root/new/"
install_quietly systemd systemd-sysv  # to test the unit; prefixd alone needs systemd-sysusers
install_quietly $(cd "$root" && printf '/%s\n' root/old/*.deb)
inside prefixd --version | head -n 1 | grep -F "prefixd ${version}" || fail "prefixd --version"
inside id prefixd >/dev/null || fail "no user prefixd"
[ "$(inside getent passwd prefixd | cut -d: -f7)" = /usr/sbin/nologin ] || fail "the user can log in"
inside systemd-analyze verify --man=no /lib/systemd/system/prefixd.service || fail "the unit"
inside systemctl is-enabled prefixd.service >/dev/null || fail "the unit is not enabled"
for page in man1/prefixctl.1 man3/libprefixd.3 man5/prefixd.toml.5 man8/prefixd.8; do
  [ -s "$root/usr/share/man/$page.gz" ] || grep -q '/usr/share/man' "$root"/etc/dpkg/dpkg.cfg.d/* ||
    fail "no page $page"
done
python3 -m json.tool "$root/usr/share/prefixd/grafana/prefixd.json" >/dev/null || fail "the dashboard"
bash -n "$root/usr/share/bash-completion/completions/prefixctl" || fail "completion for bash"
zsh -fn "$root/usr/share/zsh/vendor-completions/_prefixctl" || fail "completion for zsh"
fish --no-execute "$root/usr/share/fish/vendor_completions.d/prefixctl.fish" || fail "completion for fish"

# What the package says beyond the defaults: who connects.
[ "$(grep -cE '^[a-z_]+ = ' "$root/etc/prefixd/prefixd.toml")" = 1 ] || fail "the conffile sets more than it must"

# Makes the directories that the unit makes before it starts the daemon.
directories() {
  inside install -d -o prefixd -g prefixd -m 750 /run/prefixd
  inside install -d -o prefixd -g prefixd -m 700 /var/lib/prefixd
}
start() {
  chroot "$root" setpriv --reuid prefixd --regid prefixd --init-groups --no-new-privs --bounding-set=-all \
    /bin/sh -c 'umask 077; exec prefixd --config /etc/prefixd/prefixd.toml' >"$work/daemon.log" 2>&1 &
  daemon=$!
  for _ in $(seq 300); do
    if grep -q '^prefixd ready' "$work/daemon.log"; then return; fi
    kill -0 "$daemon" 2>/dev/null || { cat "$work/daemon.log" >&2; fail "the daemon ended"; }
    sleep 0.1
  done
  fail "the daemon is not ready after 30 s"
}
stop() {
  kill -TERM "$daemon"
  wait "$daemon" || fail "the daemon ended with $?"
  daemon=
}

step "the daemon, with the configuration of the package"
directories
start
inside useradd engine && inside usermod -aG prefixd engine && inside useradd outsider
inside prefixctl status
as engine prefixctl status >/dev/null || fail "a member of the group cannot connect"
as engine prefixctl prefixes list --all-tenants 2>/dev/null && fail "a member of the group is admin"
as outsider prefixctl status 2>/dev/null && fail "anybody can connect"

step "a C program with pkg-config, a C++ program with CMake"
install_quietly build-essential cmake pkg-config
inside sh -ec 'cd /root && cp -r /usr/share/doc/libprefixd-dev/examples . && cd examples/c
  cc -std=c99 splice.c $(pkg-config --cflags --libs prefixd) -lm -o /usr/local/bin/splice
  cmake -S ../cpp -B /root/cpp >/dev/null && cmake --build /root/cpp >/dev/null
  cp /root/cpp/list_prefixes /usr/local/bin/'
as engine splice unix:/run/prefixd/prefixd.sock || fail "splice against the daemon"
inside splice /tmp/own >/dev/null || fail "splice with a store of its own (libprefixd-embedded)"
as engine list_prefixes unix:/run/prefixd/prefixd.sock | grep -q 'tokens of c-example' || fail "C++"
prefix=$(inside prefixctl prefixes list --json | sed -n 's/^ *"id": "\([0-9a-f]*\)".*/\1/p')
[ -n "$prefix" ] || fail "nothing stored"

# --- upgraded ------------------------------------------------------------------------------------
step "upgrade to $version+1"
stop
echo '# a line of the administrator' >>"$root/etc/prefixd/prefixd.toml"
install_quietly $(cd "$root" && printf '/%s\n' root/new/*.deb)
[ "$(inside dpkg-query -W -f '${Version}' prefixd)" = "$version+1" ] || fail "not upgraded"
tail -n 1 "$root/etc/prefixd/prefixd.toml" | grep -q administrator || fail "the configuration is lost"
directories
start
inside prefixctl prefixes show "$prefix" >/dev/null || fail "the stored prefix is gone"
inside prefixctl prefixes verify --quiet || fail "stored bytes do not verify"
as engine splice unix:/run/prefixd/prefixd.sock | tee "$work/splice.log" >/dev/null
grep -q '^stored 0 of' "$work/splice.log" || fail "the prompt was stored anew"
grep -q '^attached to' "$work/splice.log" || fail "the stored prompt is not used"
stop

# --- the unit itself -----------------------------------------------------------------------------
if [ "${DEB_TEST_BOOT:-1}" = 1 ]; then
  step "boot the fresh system and run the service under its unit"
  cp tests/packaging/booted_test.sh "$root/root/"
  rm -f "$root"/root/booted.log "$root/usr/sbin/policy-rc.d"
  cat >"$root/etc/systemd/system/booted-test.service" <<'EOF'
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c '/root/booted_test.sh >/root/booted.log 2>&1; echo "status $?" >>/root/booted.log'
ExecStartPost=/usr/bin/systemctl --no-block poweroff
[Install]
WantedBy=multi-user.target
EOF
  inside systemctl enable -q booted-test.service
  unmount_system
  # Without the capability, nspawn itself forbids mlock to every process inside.
  timeout 180 systemd-nspawn -q --register=no --keep-unit --capability=CAP_IPC_LOCK -D "$root" --boot \
    >"$work/boot.log" 2>&1 </dev/null || true
  mount_system
  sed 's/^/  /' "$root/root/booted.log" || fail "it did not boot, see $work/boot.log"
  [ "$(tail -n 1 "$root/root/booted.log")" = "status 0" ] || fail "the service, see above"
  rm "$root/etc/systemd/system/booted-test.service" \
    "$root/etc/systemd/system/multi-user.target.wants/booted-test.service"
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d" && chmod +x "$root/usr/sbin/policy-rc.d"
fi

# --- removed, purged -----------------------------------------------------------------------------
step "remove"
inside apt-get -q -y remove prefixd libprefixd-dev libprefixd-embedded0.2 libprefixd0.2 >>"$work/apt.log" 2>&1
[ ! -e "$root/usr/bin/prefixd" ] && [ -e "$root/etc/prefixd/prefixd.toml" ] &&
  [ -e "$root/var/lib/prefixd/STORE" ] || fail "remove left or took the wrong things"
step "purge"
inside apt-get -q -y purge prefixd 2>&1 | tee -a "$work/apt.log" | grep 'stay in /var/lib/prefixd' ||
  fail "purge does not say that the store stays"
[ ! -e "$root/etc/prefixd" ] && [ -e "$root/var/lib/prefixd/STORE" ] || fail "purge, with a store"
rm -rf "$root"/var/lib/prefixd/* "$root"/run/prefixd
install_quietly $(cd "$root" && printf '/%s\n' root/new/prefixd_*.deb)
inside apt-get -q -y purge prefixd >>"$work/apt.log" 2>&1
[ ! -e "$root/var/lib/prefixd" ] || fail "purge keeps an empty store"
step "what is left (nothing):"
inside find / -xdev -path /proc -prune -o -path /dev -prune -o -path /root -prune -o -print | sort |
  comm -13 "$work/files-before" - | { grep prefixd || true; } | tee "$work/left" | sed 's/^/  /'
[ ! -s "$work/left" ] || fail "files are left"

step "passed"
