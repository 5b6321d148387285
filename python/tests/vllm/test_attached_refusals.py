"""Tests what an engine that attaches refuses, and that the plugin is vLLM's own for others."""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefixd.errors import InvalidArgument
from prefixd.vllm import PrefixdConnector
from prefixd.vllm.attached import policy
from prefixd.vllm.attached.attending import Attending
from prefixd.vllm.attached.scheduling import Attaching
from prefixd.vllm.options import Options
from tests.prompts import spec


def test_a_request_replaces_the_default() -> None:
    default = {"budget": 0.05, "estimator": "moment"}
    assert policy.read(None, default) == policy.RequestPolicy(True, default)
    assert policy.read({"prefixd": {"attach": False}}, default).attach is False
    assert policy.read({"prefixd": {"k": 8}}, default).policy == {"k": 8, "estimator": "moment"}
    assert policy.read({"prefixd": {"mode": "full"}}, {"k": 8}).policy == {"mode": "full"}
    assert policy.read({"do_remote_decode": True}, {}).policy == {}  # another connector's


@pytest.mark.parametrize("wrong", [{"prefixd": 3}, {"prefixd": {"prefix": 1}}, {"prefixd": {"k": -1}}])
def test_what_no_policy_has_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="prefixd"):
        policy.read(wrong, {})


def test_options_are_checked() -> None:
    assert Options.read({"prefixd": "/d", "attach": True, "policy": {"k": 4}}).policy == {"k": 4}
    with pytest.raises(InvalidArgument, match="'policy'"):
        Options.read({"prefixd": "/d", "policy": "full"})
    with pytest.raises(InvalidArgument, match="attach_tokens"):
        Options.read({"prefixd": "/d", "attach_tokens": -1})


def test_requests_that_skip_cached_tokens_are_not_attached() -> None:
    """vLLM drops what the connector answers for them, unless they are refused."""
    side = Attaching({}, 256, 128)
    side._blocks = 4

    def request(n: int) -> Any:
        return SimpleNamespace(
            request_id="r", num_tokens=n, num_prompt_tokens=n, kv_transfer_params=None, skip_reading_prefix_cache=True
        )

    fits, huge = request(400), request(600)
    assert side.decide(fits, 0, 384, False) == (384, False)
    assert fits.skip_reading_prefix_cache
    assert side.allocated(fits, [1], 0) is None
    assert side.decide(huge, 0, 512, False) == (512, False)
    assert not huge.skip_reading_prefix_cache
    refused = side.allocated(huge, [-1], 512)
    assert refused is not None
    assert "do not fit" in refused.refused


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_forgets_the_sessions_that_have_ended(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.vllm.connector.get_tensor_model_parallel_rank", lambda: rank)
    ended: Future[dict[str, Any]] = Future()
    ended.set_result({})
    attending = Attending(cast(Any, None), spec(), (rank, 1))
    attending._reports = [ended] * 3
    connector = PrefixdConnector.__new__(PrefixdConnector)
    connector._attending = attending
    connector._worker = cast(Any, SimpleNamespace(take_counts=lambda: None))
    counts = connector.get_kv_connector_stats()
    assert attending._reports == []
    assert (counts is None) == (rank > 0)
    assert counts is None or counts.data == {"attached_ended": 3}
    attending.close()


def test_vllm_finds_the_plugin() -> None:
    (found,) = {point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins", name="prefixd")}
    assert found == "prefixd.vllm_plugin:register"
