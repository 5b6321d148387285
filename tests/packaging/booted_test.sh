#!/bin/bash
# Runs inside the booted system of deb_test.sh and tests the service under its unit with everything
# that the unit forbids. There is a user `engine` in the group prefixd, an `outsider`, and a stored
# prefix.
set -euo pipefail
fail() { echo "FAILED: $1"; systemctl status --no-pager prefixd.service || true; exit 1; }
show() { systemctl show --value -p "$1" prefixd.service; }

systemctl start prefixd.service || fail "the service does not start"  # Type=notify: until it is ready
[ "$(show ActiveState)" = active ] || fail "it is not active"
[[ $(show StatusText) == "prefixd ready: unix:/run/prefixd/prefixd.sock" ]] || fail "its status: $(show StatusText)"
echo "status: $(show StatusText)"
[ "$(stat -c '%a %U %G' /run/prefixd)" = "750 prefixd prefixd" ] || fail "$(stat /run/prefixd)"
[ "$(stat -c '%a %U %G' /run/prefixd/prefixd.sock)" = "660 prefixd prefixd" ] || fail "$(stat /run/prefixd/prefixd.sock)"
pid=$(show MainPID)
[ "$(awk '/^Seccomp:/ { print $2 }' "/proc/$pid/status")" = 2 ] || fail "no system call filter"
[ "$(awk '/^CapBnd:/ { print $2 }' "/proc/$pid/status")" = 0000000000000000 ] || fail "it may have capabilities"

prefixctl prefixes verify --all-tenants --quiet || fail "stored bytes do not verify"
runuser -u engine -- splice unix:/run/prefixd/prefixd.sock || fail "a member of the group"
if runuser -u outsider -- prefixctl status 2>/dev/null; then fail "anybody can connect"; fi

# The daemon locks memory (block by block, as it takes it) and stores another tenant's prompt under
# the system call filter.
sed -i 's/^#host_tier_mlock = .*/host_tier_mlock = true/; s/^#host_tier_mib = .*/host_tier_mib = 64/' /etc/prefixd/prefixd.toml
systemctl restart prefixd.service || fail "it does not start with locked memory"
prefixctl prefixes list | grep -q c-example || fail "the prefix is gone after a restart"
prefixes=$(prefixctl prefixes list --json | sed -n 's/^ *"id": "\([0-9a-f]*\)".*/\1/p')
for prefix in $prefixes; do prefixctl prefixes remove "$prefix" >/dev/null; done
runuser -u engine -- splice unix:/run/prefixd/prefixd.sock | grep '^stored 1000 of' || fail "put under the unit"
prefixctl status | grep 'file I/O'  # io_uring, where the kernel has it: the filter lets it pass
locked=$(awk '/^VmLck:/ { print $2 }' "/proc/$(show MainPID)/status")
echo "locked: $locked KiB"
[ "$locked" -gt 0 ] || fail "the host tier is not locked"

# The socket belongs to another group, of which a drop-in makes the daemon a member.
groupadd -f engines
install -d /etc/systemd/system/prefixd.service.d
printf '[Service]\nSupplementaryGroups=engines\n' >/etc/systemd/system/prefixd.service.d/group.conf
cp /etc/prefixd/prefixd.toml /root/prefixd.toml
sed -i 's/^#socket_group = .*/socket_group = "engines"/' /etc/prefixd/prefixd.toml
systemctl daemon-reload && systemctl restart prefixd.service || fail "it does not start with listen.socket_group"
[ "$(stat -c '%a %U %G' /run/prefixd/prefixd.sock)" = "660 prefixd engines" ] || fail "$(stat /run/prefixd/prefixd.sock)"
# One line opens the devices.
printf '[Service]\nPrivateDevices=no\n' >/etc/systemd/system/prefixd.service.d/group.conf
cp /root/prefixd.toml /etc/prefixd/prefixd.toml
systemctl daemon-reload && systemctl restart prefixd.service || fail "it does not start with devices"
[ "$(show DevicePolicy)" = auto ] || fail "devices are closed: $(show DevicePolicy)"
rm -r /etc/systemd/system/prefixd.service.d && systemctl daemon-reload && systemctl restart prefixd.service

kill -KILL "$(show MainPID)"
for _ in $(seq 100); do
  [ "$(show NRestarts)" = 1 ] && [ "$(show ActiveState)" = active ] && break
  sleep 0.2
done
[ "$(show NRestarts) $(show ActiveState)" = "1 active" ] || fail "it is not restarted after a crash"
systemctl stop prefixd.service
[ "$(show Result) $(show ExecMainStatus)" = "success 0" ] || fail "it does not stop in order"
[ ! -e /run/prefixd ] || fail "/run/prefixd is left"
if journalctl -u prefixd.service --no-pager | grep -iE 'SIGSYS|not permitted|denied'; then fail "something was forbidden"; fi
