"""Tests what an engine that attaches refuses, and that the plugin is vLLM's own for others."""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from prefixd.errors import InvalidArgument
from prefixd.vllm import PrefixdConnector
from prefixd.vllm.attached import policy
from prefixd.vllm.attached.attending import Attending
from prefixd.vllm.attached.scheduling import Attaching
from prefixd.vllm.attached.spec import AttachedManager
from prefixd.vllm.messages import Attachment
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
    assert Options.read({"prefixd": "/d", "attach": True, "own_window": 300}).own_window == 300
    with pytest.raises(InvalidArgument, match="own_window"):
        Options.read({"prefixd": "/d", "attach": True, "own_window": -1})
    with pytest.raises(InvalidArgument, match='"own_window" is of attached prefixes'):
        Options.read({"prefixd": "/d", "own_window": 300})
    with pytest.raises(InvalidArgument, match='it needs "own_window"'):
        Options.read({"prefixd": "/d", "attach": True, "own_memory_tokens": 300})
    with pytest.raises(InvalidArgument, match="256 or more"):
        Options.read({"prefixd": "/d", "attach": True, "own_window": 300, "own_memory_tokens": 255})


def test_a_window_fits_the_cache() -> None:
    """A request that goes on needs its window and a block at each end of it."""
    manager = AttachedManager.__new__(AttachedManager)
    bound = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=(manager,)), kv_cache_config=SimpleNamespace(num_blocks=7)
    )
    Attaching({}, 256, 4 * 128, 128).bind(cast(Any, bound))
    assert manager.own_window == 4 * 128
    with pytest.raises(InvalidArgument, match="at most 512"):
        Attaching({}, 256, 4 * 128 + 1, 128).bind(cast(Any, bound))


@pytest.mark.parametrize(
    ("length", "queries", "generates", "hands_over"),
    [
        (100, 1, False, False),  # the prompt's last token alone
        (101, 1, True, False),  # computed again, in a step that had room for no more
        (120, 20, False, False),
        (121, 1, True, True),
        (150, 1, True, True),
    ],
)
def test_tokens_leave_with_those_that_are_generated(
    length: int, queries: int, generates: bool, hands_over: bool
) -> None:
    """A request that was preempted with 121 tokens, 100 of them its prompt's."""
    one = Attachment("r", "p", 64, 100, 121, {}, -1)
    assert one.generates(length, queries) == generates
    assert one.hands_over(length, queries) == hands_over


class Pool:
    def __init__(self) -> None:
        self.freed: list[int] = []

    def free_blocks(self, blocks: list[Any]) -> None:
        self.freed += [block.block_id for block in blocks]


def step(computed: int, queries: int = 1) -> Any:
    cached = SimpleNamespace(req_ids=["r"], num_computed_tokens=[computed])
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={"r": queries}
    )


def admitted(side: Attaching, manager: AttachedManager, resumable: bool = False) -> None:
    """Request "r": 256 attached tokens, a prompt of 600, nothing generated yet."""
    request: Any = SimpleNamespace(
        request_id="r", num_tokens=600, num_prompt_tokens=600, kv_transfer_params=None, resumable=resumable,
        skip_reading_prefix_cache=False,
    )  # fmt: skip
    assert side.decide(request, 0, 256, False) == (256, False)
    assert side.allocated(request, [-1], 256) is not None
    blocks = [KVCacheBlock(block_id=-1, is_null=True)] * 2 + [KVCacheBlock(block_id=10 + i) for i in range(4)]
    manager.req_to_blocks = {"r": blocks}
    manager._markers = {"r": 1}


def windowed() -> tuple[Attaching, AttachedManager, Pool]:
    manager, pool = AttachedManager.__new__(AttachedManager), Pool()
    manager.block_size, manager._skipped = 128, 0
    manager.block_pool = cast(Any, pool)
    side = Attaching({}, 256, 100, 128)
    side.bind(
        cast(
            Any,
            SimpleNamespace(
                coordinator=SimpleNamespace(single_type_managers=(manager,)),
                kv_cache_config=SimpleNamespace(num_blocks=20),
            ),
        )
    )
    return side, manager, pool


def test_blocks_are_given_back_behind_the_step_that_handed_their_tokens_over() -> None:
    side, manager, pool = windowed()
    admitted(side, manager)
    side.scheduled(step(256, 344))  # the question
    manager.remove_skipped_blocks("r", 600)
    assert pool.freed == []
    side.scheduled(step(600))  # the first generated token, at position 600: 501 tokens before the window
    manager.remove_skipped_blocks("r", 600)  # that step is under way
    assert pool.freed == []
    side.scheduled(step(601))
    manager.remove_skipped_blocks("r", 601)
    assert pool.freed == [10]  # of tokens 256 to 383; the next one has 384 to 511, and 501 and on are wanted
    manager.remove_skipped_blocks("r", 611)
    assert pool.freed == [10]
    manager.remove_skipped_blocks("r", 612)
    assert pool.freed == [10, 11]
    assert [block.block_id for block in manager.req_to_blocks["r"]] == [-1] * 4 + [12, 13]
    # A preempted request begins again.
    admitted(side, manager)
    manager.remove_skipped_blocks("r", 700)
    assert pool.freed == [10, 11]
    side.finished("r")
    assert manager.handing == {}


def test_sessions_that_get_more_input_keep_their_blocks() -> None:
    side, manager, pool = windowed()
    admitted(side, manager, resumable=True)
    side.scheduled(step(600))
    manager.remove_skipped_blocks("r", 700)
    assert pool.freed == []


def test_engines_of_several_ranks_have_no_window() -> None:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"prefixd": "/d", "attach": True, "own_window": 8},
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )
    with (
        patch("prefixd.vllm.connector.KVConnectorBase_V1.__init__"),
        pytest.raises(InvalidArgument, match="of one rank"),
    ):
        PrefixdConnector(cast(Any, config), cast(Any, None), cast(Any, None))


def test_requests_that_skip_cached_tokens_are_not_attached() -> None:
    """vLLM drops what the connector answers for them, unless they are refused."""
    side = Attaching({}, 256, 0, 128)
    side._blocks = 4

    def request(n: int) -> Any:
        return SimpleNamespace(
            request_id="r", num_tokens=n, num_prompt_tokens=n, kv_transfer_params=None, skip_reading_prefix_cache=True,
            resumable=False,
        )  # fmt: skip

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
    attending = Attending(cast(Any, None), spec(), (rank, 1), 0, 0)
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
