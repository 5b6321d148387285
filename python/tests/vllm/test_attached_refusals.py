"""Tests what an engine that attaches refuses, and that the plugin is vLLM's own for others."""

from __future__ import annotations

import importlib.metadata

import pytest

from prefixd.errors import InvalidArgument
from prefixd.vllm.attached import policy
from prefixd.vllm.options import Options


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


def test_vllm_finds_the_plugin() -> None:
    (found,) = {point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins", name="prefixd")}
    assert found == "prefixd.vllm_plugin:register"
