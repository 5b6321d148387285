"""Tests what a user gives to the connector, and that docs/vllm.md says the same."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import prefixd
from prefixd.vllm.options import Options
from tests.vllm.engines import ROOT


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"prefixd": "localhost:9000"}, "begins with tcp: .tcp:localhost:9000."),
        ({"prefixd": "unix:/s", "daemon": []}, '"daemon" is of a daemon that the engine starts'),
        ({"prefixd": "tcp:h:1", "start_seconds": 5}, '"start_seconds" is of a daemon that the engine starts'),
        ({"prefixd": "/d", "token": "a", "token_file": "/f"}, "give one of them"),
        ({"prefixd": "/d", "token_file": "/no/such/file"}, "'token_file' .* cannot be read: .*/no/such/file"),
        ({"prefixd": "/d", "token_file": "/dev/null"}, "'token_file' .* is empty"),
        ({"prefixd": "/d", "start_seconds": 0}, "start_seconds and load_mib are above 0"),
        ({"prefixd": "/d", "call_seconds": float("nan")}, "'call_seconds' .* cannot be nan"),
    ],
)
def test_places_are_checked(given: dict[str, Any], what: str) -> None:
    with pytest.raises(prefixd.InvalidArgument, match=what):
        Options.read(given)


def test_a_socket_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").touch()
    with pytest.raises(prefixd.InvalidArgument, match=f"is no directory; the socket of a daemon is unix:{tmp_path}/s"):
        Options.read({"prefixd": str(tmp_path / "s")})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Options.read({"prefixd": "~/kv"}).directory == tmp_path / "kv"


def test_a_token_is_read_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret words\n")
    options = Options.read({"prefixd": "/d", "token_file": str(tmp_path / "token")})
    assert options.token == "secret words"
    assert "secret words" not in repr(options)


def test_the_page_has_every_option_and_its_default() -> None:
    page = (ROOT / "docs/vllm.md").read_text()
    table = page.split("## Options")[1].split("\n## ")[0]
    said: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`[^|]*`) \| ([^|]*)\|", table, re.MULTILINE):
        said |= dict.fromkeys(re.findall(r"`(\w+)`", names), default.strip().strip("`"))
    assert list(said) == [field.name for field in fields(Options)]
    for field in fields(Options):
        if field.default is MISSING or not field.default and not isinstance(field.default, (bool, int, float)):
            assert said[field.name] in ("", '""', "{}"), field.name
        elif isinstance(field.default, bool):
            assert said[field.name] == str(field.default).lower(), field.name
        else:
            assert float(said[field.name]) == field.default, field.name
