"""The benchmark beside other stores (bench/peers), with the peers that need no download and small prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("PREFIXD_BUILD", ROOT / "build/release"))
PEERS = ["prefixd", "prefixd-embedded", "safetensors", "safetensors-synced"]


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "bench/peers/peers_bench.py", "--quick", "--memory-gib", "1", "--build", BUILD,
         *arguments],
        capture_output=True, text=True, timeout=300, check=True)  # fmt: skip


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("peers")
    (folder / "stores").mkdir()
    done = bench("--only", *PEERS, "mooncake", "--dir", folder / "stores", "--json", folder / "out.json")
    assert not list((folder / "stores").iterdir()), "something was left behind"
    out = json.loads((folder / "out.json").read_text())
    out["table"] = done.stdout
    return out


def peer(figures: dict, name: str) -> dict:
    (one,) = [one for one in figures["peers"] if one["name"] == name]
    return one


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_stores_and_restores(figures: dict, name: str) -> None:
    one = peer(figures, name)
    assert one["title"] in figures["table"] and one["survives_restart"]
    for stored, restored in zip(one["lengths"], one["lengths_restored"], strict=True):
        assert stored["store"]["median"] > 0 and restored["warm"]["median"] > 0
        assert stored["disk_over_rows"] >= 1


def test_prefixd_keeps_what_prompts_share_once(figures: dict) -> None:
    for own in peer(figures, "prefixd")["lengths"]:
        # What is derived of short prompts takes space, too.
        assert own["sharing_disk_over_rows"] < own["disk_over_rows"] - 0.3
    for own in peer(figures, "safetensors")["lengths"]:
        assert 0.99 < own["sharing_disk_over_rows"] < 1.1


def test_a_flipped_bit_is_found_by_prefixd_and_served_by_safetensors(figures: dict) -> None:
    for name in PEERS:
        assert peer(figures, name)["flipped"]["where"] == "in a stored row"
    assert "silently: 1 bytes wrong" in peer(figures, "safetensors")["flipped"]["outcome"]
    for name in ("prefixd", "prefixd-embedded"):
        assert peer(figures, name)["flipped"]["outcome"].startswith(("detected", "absent"))


def test_a_killed_put_is_whole_or_absent_in_prefixd(figures: dict) -> None:
    for name in ("prefixd", "prefixd-embedded", "safetensors-synced"):
        for kill in peer(figures, name)["killed"]:
            assert kill["reopened"] == "yes" and kill["kept"] == "whole and right"
            assert kill["torn"] in ("absent", "whole and right")


def test_only_prefixd_decodes_behind_a_stored_prompt(figures: dict) -> None:
    few, every = peer(figures, "prefixd")["decode"]
    assert 0 < few["bytes"] < every["bytes"]
    assert not peer(figures, "safetensors")["decode"]


def test_ratios_compare_the_same_work(figures: dict) -> None:
    ours, other = peer(figures, "prefixd"), peer(figures, "safetensors")
    n = ours["lengths"][0]["tokens"]
    ratio = figures["ratios"][f"prefixd_over_safetensors_store_{n}_smollm2-135m"]
    assert ratio == ours["lengths"][0]["store"]["median"] / other["lengths"][0]["store"]["median"]


def test_what_cannot_run_is_listed_with_the_reason(figures: dict) -> None:
    if any(one["name"] == "mooncake" for one in figures["peers"]):
        pytest.skip("Mooncake is installed here")
    (one,) = [one for one in figures["not_run"] if one["name"] == "mooncake"]
    assert "not installed" in one["reason"] and one["reason"] in figures["table"]


def test_equal_beginnings_have_equal_rows_and_others_not() -> None:
    code = """
import sys; sys.path.insert(0, 'bench/peers')
from workload import Cache, Prompt, Shape, read_workload
shape = Shape('s', 2, 3, 9, 64)
cache, first, second = Cache(shape, 100), Prompt(100, 1), Prompt(100, 2, 1, 50)
cache.fill(second)
assert cache.wrong_bytes(second, 100) == 0 and cache.wrong_bytes(first, 50) == 0
assert cache.wrong_bytes(first, 100) > 1000
cache.memory[1, 0, 70, 2, 5] ^= 1
assert cache.wrong_bytes(second, 100) == 1 and cache.wrong_bytes(second, 70) == 0
assert (first.tokens[:50] == second.tokens[:50]).all() and (first.tokens[50:] != second.tokens[50:]).any()
for quick in (False, True):
    work = read_workload(quick)
    assert len({prompt.document for prompt in work.prompts}) == len(work.prompts)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
