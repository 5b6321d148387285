#!/usr/bin/env python3
"""Tests what the packaged unit lets the daemon do, by reading it as systemd does."""

from __future__ import annotations

import shutil
import subprocess
import sys
import unittest
from pathlib import Path

UNIT = Path(__file__).resolve().parents[2] / "packaging/prefixd.service"


def settings(text: str) -> list[tuple[str, str]]:
    lines = (line.strip() for line in text.splitlines())
    return [tuple(line.split("=", 1)) for line in lines if "=" in line and line[0] not in "#;"]


def calls(name: str) -> set[str]:
    """The system calls of a group, and of the groups in it."""
    if not name.startswith("@"):
        return {name}
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager", name], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1:]
    names = [line.strip() for line in listed if line.strip() and not line.strip().startswith("#")]
    return set().union(*(calls(inner) for inner in names))


class Unit(unittest.TestCase):
    unit = settings(UNIT.read_text())

    def values(self, key: str) -> list[str]:
        return [value for name, value in self.unit if name == key]

    def test_the_first_line_of_the_filter_names_what_is_allowed(self) -> None:
        # Else the later lines would be read as a list of what is forbidden.
        self.assertFalse(self.values("SystemCallFilter")[0].startswith("~"))

    @unittest.skipUnless(shutil.which("systemd-analyze"), "no systemd-analyze here")
    def test_the_filter_lets_the_socket_have_its_group(self) -> None:
        allowed: set[str] = set()
        for line in self.values("SystemCallFilter"):
            for name in line.lstrip("~").split():
                allowed = allowed - calls(name) if line.startswith("~") else allowed | calls(name)
        wanted = {"lchown", "fchownat", "chmod", "io_uring_setup", "io_uring_enter", "mlock"}
        self.assertEqual(wanted - allowed, set())
        self.assertEqual(allowed & {"setuid", "mount", "reboot", "chroot", "bpf"}, set())
        # chown gives a file to groups that the user is a member of, and to nobody else.
        self.assertEqual(self.values("CapabilityBoundingSet"), [""])

    def test_one_line_of_a_drop_in_opens_the_devices(self) -> None:
        # PrivateDevices=yes closes them by itself; what is said beside it outlives PrivateDevices=no.
        self.assertEqual(self.values("PrivateDevices"), ["yes"])
        self.assertEqual(self.values("DevicePolicy") + self.values("DeviceAllow"), [])

    def test_it_starts_with_the_right_time(self) -> None:
        for key in ("After", "Wants"):
            self.assertIn("time-sync.target", " ".join(self.values(key)).split())


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
