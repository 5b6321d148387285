"""Sessions under retention policies, measured on a recorded text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from prefixd.retention import sessions
from prefixd.retention.record import FORMAT
from prefixd.retention.seen import Seen

HEADS, GROUP, DIM, PROMPT, TOKENS = 2, 2, 16, 400, 1900
SCALE = 0.5


def write_text(folder: Path) -> None:
    """Some own tokens have keys that all queries look for, so that a policy which sees that keeps them."""
    made = torch.Generator().manual_seed(5)
    q = torch.randn(HEADS * GROUP, TOKENS, DIM, generator=made)
    k, v = (torch.randn(HEADS, TOKENS, DIM, generator=made) for _ in range(2))
    wanted = torch.randn(DIM, generator=made)
    q += wanted
    k[:, PROMPT + 50 : TOKENS : 37] += wanted
    tensors = {f"layers.0.{name}": x.to(torch.bfloat16) for name, x in (("q", q), ("k", k), ("v", v))}
    path = folder / "traces" / "prose-0.safetensors"
    path.parent.mkdir()
    save_file(tensors, path, {"format": FORMAT, "kind": "prose", "source": "made", "scales": json.dumps({"0": SCALE})})


def test_a_policy_is_measured_beside_a_session_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path)
    out = tmp_path / "figures.json"
    arguments = ["--recorded", str(tmp_path), "--policies", "local", "--layers", "0", "--prompt", str(PROMPT)]
    assert sessions.main([*arguments, "--json", str(out)]) == 0
    assert "| local |" in capsys.readouterr().out
    rows = {row["method"]: row for row in map(json.loads, (tmp_path / "sessions.jsonl").read_text().splitlines())}
    assert rows["none"]["retained"] == 0 and rows["local"]["retained"] == sessions.Memory.of("local").retained == 256
    # Without a policy a step reads what it selects, with one no more than that.
    np.testing.assert_allclose(rows["none"]["read"], sessions.LENGTHS)
    assert all(a < b for a, b in zip(rows["local"]["read"], sessions.LENGTHS, strict=True))
    for row in rows.values():
        assert all(0 < later < error < 1 for error, later in zip(row["errors"], row["errors"][1:], strict=False))
    # The policy holds what all queries want.
    body = json.loads(out.read_text())
    assert body["policies"]["local"][0]["of_none"][0] < 0.9
    # The same command measures nothing again.
    before = (tmp_path / "sessions.jsonl").read_bytes()
    assert sessions.main(arguments) == 0
    assert (tmp_path / "sessions.jsonl").read_bytes() == before


def test_errors_are_read_off_between_what_was_measured() -> None:
    row = {"read": [10.0, 40.0], "errors": [0.4, 0.1]}
    assert sessions.at_reads(row, 10) == pytest.approx(0.4)
    assert sessions.at_reads(row, 20) == pytest.approx(0.2)


def test_exact_attention_is_that_of_all_tokens_before() -> None:
    made = torch.Generator().manual_seed(6)
    q, k, v = torch.randn(2, 3, 9, 4, generator=made), *(torch.randn(2, 9, 4, generator=made) for _ in range(2))
    got = sessions.exact(Seen(q, k, v, 2, SCALE), 6)
    want = torch.softmax(torch.einsum("hgd,htd->hgt", q[:, :, 6], k[:, :7]) * SCALE, -1) @ v[:, :7]
    np.testing.assert_allclose(got, want.reshape(-1, 4).numpy(), atol=1e-6)


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sessions.main(["--recorded", str(tmp_path)]) == 1
    assert "holds no traces" in capsys.readouterr().err
    write_text(tmp_path)
    assert sessions.main(["--recorded", str(tmp_path), "--layers", "0,1"]) == 1
    assert "lacks some of the layers" in capsys.readouterr().err
