"""Tests who starts the daemon of a directory, and again; how long an engine waits for it, and what it says."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefixd.errors import FailedPrecondition, InvalidArgument
from prefixd.vllm import launch, reach, supervisor
from prefixd.vllm.daemon import Daemon
from prefixd.vllm.launch import Patience, Site, StoreInUse
from prefixd.vllm.options import Options
from prefixd.vllm.supervisor import Supervisor
from tests.prompts import Prompt, spec
from tests.vllm.conftest import eventually
from tests.vllm.engines import DAEMON, ROOT

SECONDS = 120.0  # of a start that is to succeed, on a busy machine


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the connector logs."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname}: {record.getMessage()}")

    log, keep = logging.getLogger("vllm.prefixd"), Keep()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(keep)
    yield lines
    log.removeHandler(keep)
    log.setLevel(level)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_PAUSE", 0.02)
    monkeypatch.setattr(reach, "_PAUSE", 0.02)


def in_directory(folder: Path, *more: str, seconds: float = SECONDS) -> Daemon:
    return Daemon(Options(str(folder), daemon=(*DAEMON, *more), start_seconds=seconds))


def running(daemon: Daemon) -> subprocess.Popen[bytes]:
    assert daemon._supervisor is not None and daemon._supervisor._process is not None
    return daemon._supervisor._process


def close(daemon: Daemon) -> None:
    daemon.close()
    assert running(daemon).wait(SECONDS) == 0


class Script:
    """Stands for the daemon's program: a shell script, which has the descriptor to be told in $ready."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        path = folder / "program"
        path.write_text('#!/bin/bash\nfor ready; do :; done\nsay() { eval "echo prefixd ready >&$ready"; }\n' + text)
        path.chmod(0o755)
        monkeypatch.setattr(launch, "program", lambda: str(path))
        self.site = Site(folder, ())
        self.lost: list[str] = []

    def supervisor(self, seconds: float = SECONDS) -> Supervisor:
        return Supervisor(self.site, seconds, lambda: False, self.lost.append)


# ---- again ----


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_daemon_that_dies_is_started_again(tmp_path: Path, said: list[str], how: signal.Signals) -> None:
    daemon = in_directory(tmp_path / "kv")
    line = daemon.line(rows=False)
    daemon.greet(line, spec("f32", "m"))
    for _ in range(2):
        died = running(daemon)
        died.send_signal(how)
        eventually(lambda died=died: running(daemon) is not died)
        eventually(lambda: not daemon.reach.away)
        with line.call() as store:  # of the same store, over the same line
            assert [model.name for model in store.list_models().models] == ["m"]
    assert any("does not answer" in text and how.name in text for text in said)
    (warning, _) = (text for text in said if "is started again in" in text)
    assert f"was ended by {how.name}" in warning and "ends with\n  " in warning and "prefixd ready" in warning
    close(daemon)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_somebody_stops_stays_away(tmp_path: Path, said: list[str], how: signal.Signals) -> None:
    daemon = in_directory(tmp_path / "kv")
    process = running(daemon)
    process.send_signal(how)
    (warning,) = eventually(lambda: [text for text in said if "was stopped and is not started again" in text])
    assert f"--dir {tmp_path / 'kv'} --socket" in warning
    assert daemon.reach.away and running(daemon) is process
    # Who follows the advice is found.
    other = subprocess.Popen(Site(tmp_path / "kv", tuple(DAEMON)).command(), stdout=subprocess.DEVNULL)
    eventually(lambda: not daemon.reach.away)
    daemon.close()
    other.terminate()
    assert other.wait(SECONDS) == 0


def test_a_daemon_that_always_dies_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(supervisor, "_ENDS", 3)
    script = Script(tmp_path, monkeypatch, "echo out of luck; say; exit 3")
    script.supervisor().start()
    (error,) = eventually(lambda: [text for text in said if text.startswith("ERROR")])
    assert "has failed 4 times within 10 minutes and is not started again" in error
    assert "start it yourself" in error and "it ended with status 3" in error and "out of luck" in error
    assert len([text for text in said if "is started again in" in text]) == 3
    assert (tmp_path / "prefixd.log").read_text() == 4 * "out of luck\n"
    assert len(script.lost) == 4


def test_a_daemon_that_cannot_be_started_again_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(supervisor, "_ENDS", 2)
    flag = tmp_path / "once"
    Script(tmp_path, monkeypatch, f"[ ! -e {flag} ] || exit 1; touch {flag}; say; kill -9 $$").supervisor().start()
    (error,) = eventually(lambda: [text for text in said if text.startswith("ERROR")])
    assert "has failed 3 times" in error and "did not start: it ended with status 1" in error
    assert any("SIGKILL (for want of memory?)" in text for text in said)


def test_an_end_long_ago_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_ENDS", 1)
    monkeypatch.setattr(supervisor, "_WITHIN", 0.0)
    script = Script(tmp_path, monkeypatch, "say; exit 3")
    own = script.supervisor()
    own.start()
    eventually(lambda: len(script.lost) > 4)
    own.close()


# ---- the start ----


def test_a_start_without_progress_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path, monkeypatch, "echo one; echo two >&2; exec sleep 1000")
    own = script.supervisor(0.5)
    with pytest.raises(FailedPrecondition, match='"start_seconds"[^\n]*start it yourself[^\n]*\n  one\n  two$'):
        own.start()
    assert own._process is not None and own._process.returncode == -signal.SIGTERM


def test_a_start_that_takes_no_notice_of_a_signal_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_ENDING_SECONDS", 0.2)
    script = Script(tmp_path, monkeypatch, "trap '' TERM; while :; do sleep 0.1; done")
    own = script.supervisor(0.5)
    with pytest.raises(FailedPrecondition, match="says nothing"):
        own.start()
    assert own._process is not None and own._process.returncode == -signal.SIGKILL


def test_progress_is_waited_for_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    now = 0.0
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: now))
    site = Site(tmp_path, ())
    patience = Patience(site, 60)
    for done in range(10):
        now += 50
        with site.log.open("a") as log:
            log.write(f"{done} of 10 files\n")
        assert not patience.over("it opens its store")
    assert said[-1] == "INFO: prefixd: it opens its store, for 500 s now; its log says: 9 of 10 files"
    now += 59
    assert not patience.over("it opens its store")
    now += 1
    assert patience.over("it opens its store")


def test_a_daemon_with_wrong_arguments_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="(?s)not start: it ended with status 2; its log, .*no-such-option"):
        in_directory(tmp_path / "kv", "--no-such-option")


def test_a_path_that_is_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="socket path too long.*choose a shorter one"):
        in_directory(tmp_path / ("long" * 30))


def lock(folder: Path) -> int:
    """Takes the store as another process would."""
    folder.mkdir()
    own = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(own, fcntl.LOCK_EX)
    os.write(own, b"4711\n")
    return own


def test_who_still_has_the_store_is_waited_for(tmp_path: Path, said: list[str]) -> None:
    own = lock(tmp_path / "kv")
    started: list[Daemon] = []
    thread = threading.Thread(target=lambda: started.append(in_directory(tmp_path / "kv")))
    thread.start()
    eventually(lambda: any("waiting for the store" in text and "in use by process 4711" in text for text in said))
    assert not started
    os.close(own)
    thread.join()
    close(started[0])


def test_who_keeps_the_store_is_named(tmp_path: Path) -> None:
    own = lock(tmp_path / "kv")
    with pytest.raises(FailedPrecondition, match="(?s)not answer at .*prefixd.sock.*end it.*process 4711") as failed:
        in_directory(tmp_path / "kv", seconds=1)
    assert isinstance(failed.value.__cause__, StoreInUse)
    os.close(own)


def test_a_daemon_that_is_there_is_used(tmp_path: Path) -> None:
    first = in_directory(tmp_path / "kv")
    second = in_directory(tmp_path / "kv")
    assert second._supervisor is not None and second._supervisor._process is None
    second.close()
    with first.line(rows=False).call() as store:
        assert store.list_models().models == []
    close(first)


@pytest.mark.parametrize(
    ("attach", "more", "deferred"),
    [(False, (), True), (True, (), False), (False, ("--defer-ingest=false",), False)],
)
def test_codes_and_summaries_wait_until_an_engine_attaches(
    tmp_path: Path, attach: bool, more: tuple[str, ...], deferred: bool
) -> None:
    daemon = Daemon(Options(str(tmp_path / "kv"), daemon=(*DAEMON, *more), start_seconds=SECONDS, attach=attach))
    line = daemon.line(rows=True)
    daemon.greet(line, spec("f32", "m"))
    prompt = Prompt()
    with line.call() as store:
        with store.begin_put("m", prompt.tokens) as put:
            for layer, (k, v) in enumerate(zip(prompt.k, prompt.v, strict=True)):
                put.write(layer, 0, k, v)
        (stored,) = store.list_prefixes().prefixes
    assert (stored["ingest"] == "deferred") is deferred
    close(daemon)


def test_a_daemon_is_not_bound_to_the_core_of_a_worker(tmp_path: Path) -> None:
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    try:
        daemon = in_directory(tmp_path / "kv")
    finally:
        os.sched_setaffinity(0, own)
    assert os.sched_getaffinity(running(daemon).pid) == os.sched_getaffinity(os.getppid())
    close(daemon)


def test_processes_that_start_together_start_one(tmp_path: Path) -> None:
    started: list[Daemon] = []
    threads = [threading.Thread(target=lambda: started.append(in_directory(tmp_path / "kv"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [one for one in started if one._supervisor is not None and one._supervisor._process is not None]
    assert len(started) == 4 and len(own) == 1
    for one in started:
        if one is not own[0]:
            one.close()
    close(own[0])


def test_a_process_that_starts_the_daemon_for_ever_is_named(tmp_path: Path) -> None:
    with (tmp_path / "vllm.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FailedPrecondition, match="another process has been starting a daemon.*start it yourself"):
            in_directory(tmp_path, seconds=0.5)


# ---- the end ----


def test_an_engine_that_ends_while_its_daemon_starts_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path, monkeypatch, "exec sleep 1000")
    own = script.supervisor()
    failed: list[BaseException] = []

    def start() -> None:
        try:
            own.start()
        except FailedPrecondition as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    eventually(lambda: own._process is not None)
    own.close()
    thread.join()
    assert len(failed) == 1 and script.lost == []


def test_a_daemon_ends_with_its_engine(tmp_path: Path) -> None:
    text = f"""
from prefixd.vllm.daemon import Daemon
from prefixd.vllm.options import Options
import time
daemon = Daemon(Options({str(tmp_path / "kv")!r}, daemon={tuple(DAEMON)!r}))
print("the daemon is", daemon._supervisor._process.pid, flush=True)
time.sleep(1000)
"""
    engine = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "NOTIFY_SOCKET": "/of/the/engine"},
        text=True,
    )
    assert engine.stdout is not None
    pid = next(line.split()[-1] for line in engine.stdout if line.startswith("the daemon is"))
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"PATH=" in environment and b"NOTIFY_SOCKET" not in environment
    engine.kill()
    engine.wait()

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    eventually(gone)


_BOUND = """
import ctypes, os, subprocess, sys
node = ctypes.c_ulong(1)
if ctypes.CDLL(None).syscall(238, 2, ctypes.byref(node), 64):  # set_mempolicy(MPOL_BIND)
    sys.exit(77)
cpus = ",".join(map(str, os.sched_getaffinity(0)))
sys.exit(subprocess.run([sys.executable, "-I", "-S", "-c", sys.argv[1], str(os.getpid()), cpus,
                         "/bin/cat", "/proc/self/numa_maps"]).returncode)
"""


@pytest.mark.skipif(
    os.uname().machine != "x86_64" or not Path("/proc/self/numa_maps").exists(), reason="no memory policies here"
)
def test_a_daemon_is_not_bound_to_the_memory_of_who_starts_it() -> None:
    """A worker of vLLM binds its memory to a node, and a memory policy survives fork and exec."""
    ran = subprocess.run([sys.executable, "-c", _BOUND, launch._WITH_ITS_STARTER], capture_output=True, text=True)
    if ran.returncode == 77:
        pytest.skip("this process may not bind its memory")
    assert ran.returncode == 0, ran.stderr
    assert " default " in ran.stdout and " bind" not in ran.stdout
