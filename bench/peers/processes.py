"""What processes and files cost: processor time, memory, disk space, pages in the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from pathlib import Path

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def cpu_seconds(pids: list[int]) -> float:
    """Returns the processor time of living processes, all their threads."""
    # The clock of a process by its id, as clock_getcpuclockid gives it.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    return 0


def begin_peak(pids: list[int]) -> int:
    """Begins to look for the most memory; returns what is resident now."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return sum(status(pid, "VmRSS") for pid in pids)


def peak(pids: list[int]) -> int:
    """Returns the most memory since `begin_peak`. Pages of files that a process maps count, and memory that two
    processes share counts twice."""
    return sum(status(pid, "VmHWM") for pid in pids)


def files_of(folder: Path) -> list[Path]:
    """Returns them in the order of their names. What runs in the folder may remove them before they are used."""
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def disk_bytes(folder: Path) -> int:
    """Returns the space that the files of a folder take."""
    total = 0
    for path in files_of(folder):
        with contextlib.suppress(FileNotFoundError):  # a database removes files meanwhile
            total += path.stat().st_blocks * 512
    return total


def drop_pages(folder: Path) -> float:
    """Writes back the files of a folder and takes them out of the page cache; returns the share of their pages
    that is still there."""
    still = total = 0
    for path in files_of(folder):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if size := os.fstat(descriptor).st_size:
                still += resident_pages(descriptor, size)
                total += -(-size // PAGE)
        finally:
            os.close(descriptor)
    return still / total if total else 0.0


def resident_pages(descriptor: int, size: int) -> int:
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        seen = (ctypes.c_ubyte * -(-size // PAGE))()
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), seen)
        del first
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return bytes(seen).translate(_LOW).count(1)


_LOW = bytes(byte & 1 for byte in range(256))


def flip_bit(folder: Path, pattern: bytes | None) -> str:
    """Flips one bit of the stored bytes that look like `pattern`, or in the middle of the largest file; says
    where. Nothing stored: ""."""
    files = [path for path in files_of(folder) if path.stat().st_size]
    at: tuple[Path, int] | None = None
    for path in files if pattern else []:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if (found := mapped.find(pattern or b"")) >= 0:
                at = (path, found + len(pattern or b"") // 2 + 1)  # the byte with a number's exponent
                break
    where = "in a stored row"
    if at is None:
        if not files:
            return ""
        largest = max(files, key=lambda path: path.stat().st_size)
        at, where = (largest, largest.stat().st_size // 2), "in the middle of its largest file"
    path, offset = at
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))
        file.flush()
        os.fsync(file.fileno())
    return where
