"""Tests a connection over TLS."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import prefixd
from tests.conftest import running_daemon
from tests.prompts import Prompt, spec


def certificate(directory: Path) -> tuple[Path, Path]:
    """Makes a certificate for this machine, which it has signed itself, and its key."""
    made, key = directory / "daemon.pem", directory / "daemon.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        + ["-days", "2", "-subj", "/CN=daemon", "-addext", "subjectAltName=IP:127.0.0.1"]
        + ["-out", str(made), "-keyout", str(key)],
        check=True,
        capture_output=True,
    )
    return made, key


def test_prompts_go_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, key = certificate(tmp_path)
    arguments = ["--listen", "127.0.0.1:0", "--tls-certificate", str(made), "--tls-key", str(key)]
    with running_daemon(tmp_path, *arguments) as line:
        found = re.search(r"tls:\S+", line)
        assert found
        address = found.group()
        with pytest.raises(prefixd.FailedPrecondition, match="is not accepted"):
            prefixd.connect(address)
        with pytest.raises(prefixd.FailedPrecondition, match="this port takes TLS alone"):
            prefixd.connect(address.replace("tls:", "tcp:"))
        prompt = Prompt()
        with prefixd.connect(address, tls_ca=made) as store:
            store.register_model(spec())
            prompt.put(store)
        monkeypatch.setenv("PREFIXD_TLS_CA", str(made))
        with prefixd.connect(address) as store:
            assert store.match("m", prompt.tokens).n_tokens == len(prompt.tokens)
