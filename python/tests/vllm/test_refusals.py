"""Tests what the connector refuses, and what it knows about vLLM's kernels, without an engine."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

import prefixd
from prefixd.estimate import ReuseEstimate, TimeEstimate
from prefixd.store import PrefixMatch
from prefixd.vllm import PrefixdConnector, identity, layout
from prefixd.vllm.messages import Load, Save, StepMessage
from prefixd.vllm.options import Options, check_role
from prefixd.vllm.scheduler import SchedulerSide
from prefixd.vllm.versions import TRIED, check
from prefixd.vllm.worker import WorkerSide
from tests.prompts import spec


def test_other_versions_are_refused() -> None:
    for version in TRIED:
        check(version)
        check(version + "+cpu")
    with pytest.raises(prefixd.FailedPrecondition, match=r"0\.33\.0.*install one of those"):
        check("0.33.0")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "needs 'prefixd'"),
        ({"prefixd": "/d", "tennant": "a"}, "no 'tennant'; prefixd takes .*tenant"),
        ({"prefixd": "/d", "store": "yes"}, "'store' .* cannot be 'yes'"),
        ({"prefixd": "/d", "min_tokens": -1}, "0 or more"),
        ({"prefixd": "/d", "call_seconds": 0}, "above 0"),
        ({"prefixd": "/d", "daemon": "--memory 8GiB"}, "'daemon' .* is a list of arguments"),
        ({"prefixd": "/d", "attach": True, "load": False}, '"attach" needs "load"'),
        ({"prefixd": "/d", "policy": {}}, '"policy" .* needs "attach": true'),
        ({"prefixd": "/d", "attach_tokens": 1}, '"attach_tokens" .* needs "attach": true'),
    ],
)
def test_options_are_checked(given: dict[str, Any], what: str) -> None:
    with pytest.raises(prefixd.InvalidArgument, match=what):
        Options.read(given)
    assert Options.read({"prefixd": "/d"}).directory == "/d"
    assert Options.read({"prefixd": "unix:/s"}).directory is None


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_half_a_connector_is_refused(role: str) -> None:
    check_role("kv_both")
    with pytest.raises(prefixd.InvalidArgument, match=f"'{role}', and the connector knows \"kv_both\" alone"):
        check_role(role)


def test_a_reset_of_what_is_stored_is_not_claimed() -> None:
    connector = PrefixdConnector.__new__(PrefixdConnector)  # none of its parts is asked
    assert connector.reset_cache() is False


def config(**changes: Any) -> Any:
    """Stands for vLLM's configuration of a model that is served."""
    text = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "hf_text_config": text,
            "use_mla": False,
            "get_total_num_kv_heads": lambda: 2,
            "dtype": torch.bfloat16,
            "get_sliding_window": lambda: None,
            "is_encoder_decoder": False,
            "runner_type": "generate",
        },
        "cache_config": {"cache_dtype": "auto"},
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "decode_context_parallel_size": 1,
        },
    }
    for values in parts.values():
        values.update({name: value for name, value in changes.items() if name in values})
    made = {name: SimpleNamespace(**values) for name, values in parts.items()}
    return SimpleNamespace(**made, speculative_config=changes.get("speculative_config"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"use_mla": True}, "latent cache"),
        ({"cache_dtype": "fp8"}, "cache of fp8 holds scaled numbers"),
        ({"dtype": torch.float64}, "float64"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"tensor_parallel_size": 4}, "more ranks than KV heads"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"speculative_config": object()}, "speculative"),
        ({"get_sliding_window": lambda: 4096}, "sliding-window"),
        ({"is_encoder_decoder": True}, "encoder-decoders"),
        ({"runner_type": "pooling"}, "pooling"),
        ({"hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "dynamic"})}, "'dynamic'"),
        ({"hf_text_config": SimpleNamespace()}, "no RoPE settings"),
    ],
)
def test_engines_that_cannot_be_served_are_refused(changes: dict[str, Any], what: str) -> None:
    identity.refuse(config())
    with pytest.raises(prefixd.InvalidArgument, match=what):
        identity.refuse(config(**changes))


def test_weights_without_files_must_be_named(tmp_path: Any) -> None:
    with pytest.raises(prefixd.InvalidArgument, match='"weights"'):
        identity.checkpoint_digest("some/model-of-a-hub")
    (tmp_path / "model.safetensors").write_bytes(b"a")
    one = identity.checkpoint_digest(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert identity.checkpoint_digest(str(tmp_path)) != one


KINDS = [(torch.float32, "vec"), (torch.float32, "vec16"), (torch.bfloat16, "vec"), (torch.bfloat16, "vec16"),
         (torch.float16, "vec"), (torch.bfloat16, "amx")]


@pytest.mark.parametrize(("dtype", "isa"), KINDS)
@pytest.mark.parametrize(("tokens", "dim", "heads"), [(128, 64, 2), (32, 128, 1), (256, 80, 3)])
def test_the_order_of_every_kernel_is_learnt(dtype: torch.dtype, isa: str, tokens: int, dim: int, heads: int) -> None:
    if isa == "amx" and dim % 32:
        pytest.skip("tiles are for multiples of 32")
    cache = torch.zeros(4, heads, tokens, 2 * dim, dtype=dtype)
    rows = layout.learn(cache, isa)
    k, v = (torch.randn(tokens + 9, heads, dim).to(dtype) for _ in range(2))
    table = np.array([3, 1])
    rows.scatter(cache, table, 0, tokens + 9, k, v)
    # What the connector puts into blocks is what vLLM's kernel would have put there.
    want = torch.zeros_like(cache)
    slots = torch.from_numpy(table[np.arange(tokens + 9) // tokens] * tokens + np.arange(tokens + 9) % tokens)
    parts = want.view(4, heads, 2 * tokens, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, parts[0], parts[1], slots, isa)
    assert torch.equal(cache, want)


def test_caches_that_were_not_tried_are_refused() -> None:
    names, layers = {"a": 0}, {"a": SimpleNamespace(isa="vec")}
    with pytest.raises(prefixd.FailedPrecondition, match="was tried with contiguous"):
        layout.layer_caches(names, {"a": torch.zeros(4, 2, 32, 256)[:, :, :, ::2]}, layers)


def test_seconds_wait_for_what_they_belong_to() -> None:
    side = WorkerSide(cast(Any, None), spec("f32", "m"), Options("unix:/s"), 128, (0, 2))
    side._counts.add(load_seconds=0.5)
    assert side.take_counts() is None
    side._counts.add(loads=1, load_seconds=0.25)
    counts = side.take_counts()
    assert counts is not None and counts.data == {"loads": 1, "load_seconds": 0.75}
    assert side.take_counts() is None
    side.close()


class SlowMatch:
    def __init__(self) -> None:
        self.answered = self.broken = False

    def ready(self) -> bool:
        return self.answered

    def result(self) -> PrefixMatch:
        assert self.answered, "the scheduler would have waited"
        if self.broken:
            raise prefixd.Unavailable("the daemon closed the connection")
        unknown = TimeEstimate(0, "unknown")
        estimate = ReuseEstimate(300, 0, 0, unknown, unknown, unknown, 0, "unknown")
        return PrefixMatch("p", 300, 300, 300, estimate)


def request(name: str, n: int = 300, **other: Any) -> Any:
    own = {"prompt_token_ids": [1] * n, "all_token_ids": [1] * n, "num_tokens": n, "num_prompt_tokens": n}
    own |= {"lora_request": None, "mm_features": [], "prompt_embeds": None, "cache_salt": None}
    return SimpleNamespace(request_id=name, **(own | other))


def asking(pending: SlowMatch) -> SchedulerSide:
    store: Any = SimpleNamespace(match_async=lambda *given, **named: pending)
    return SchedulerSide(store, spec("f32", "m"), Options("unix:/s"), 128)


def step(tables: dict[str, list[int]], new: dict[str, int], known: dict[str, int], scheduled: dict[str, int]) -> Any:
    """Stands for what vLLM says of a step: the blocks, the tokens that were there, and those that it computes."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=n) for name, n in new.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(known), num_computed_tokens=list(known.values())),
        num_scheduled_tokens=scheduled,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (tables[name],)),
    )


@pytest.mark.parametrize(("again", "saved"), [(300, ["a", "b"]), (128, ["a"])])
def test_what_shared_a_failed_load_is_stored_once_it_is_computed_again(again: int, saved: list[str]) -> None:
    pending = SlowMatch()
    pending.answered = True
    side = asking(pending)
    tables = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [5, 6, 7]}
    a, c = request("a"), request("c", prompt_token_ids=[3] * 300)
    b = request("b", prompt_token_ids=[1] * 256 + [2] * 44)
    for one, computed in ((a, 0), (b, 256), (c, 256)):
        external = side.matched(one, computed)[0]
        assert external is not None
        side.allocated(one, tables[one.request_id], external)
    first = side.message(step(tables, {"a": 256, "b": 256, "c": 256}, {}, {"a": 44, "b": 44, "c": 44}))
    assert [load.request for load in first.loads] == ["a"]
    assert [save.request for save in first.saves] == ["a", "b", "c"]
    failed: Any = SimpleNamespace(invalid_block_ids={1, 2})
    side.worked(failed)
    # b goes on over blocks that a has not computed again, and is not stored then.
    second = side.message(step(tables, {}, {"a": 0, "b": 256, "c": 300}, {"a": again, "b": 44, "c": 1}))
    assert [save.request for save in second.saves if save.tokens is not None] == saved
    assert [save.request for save in second.saves] == saved


class Put:
    """Stands for a put of which nothing is stored yet."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.missing = tokens, range(len(tokens))
        self.ended = ""

    def write_blocks(self, *given: Any) -> Future[None]:
        assert not self.ended
        return done()

    def commit(self) -> Future[None]:
        self.ended = "committed"
        return done()

    def abort(self) -> None:
        self.ended = "aborted"


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def test_what_is_computed_over_a_failed_load_is_not_stored() -> None:
    def gone(*given: Any, **named: Any) -> None:
        raise prefixd.Unavailable("the daemon closed the connection")

    puts: dict[int, Put] = {}

    def begin_put(model: str, tokens: list[int], **named: Any) -> Put:
        return puts.setdefault(tokens[-1], Put(tokens))

    store: Any = SimpleNamespace(attach=gone, begin_put=begin_put)
    one = spec("f32", "m")
    side = WorkerSide(store, one, Options("unix:/s"), 128, (0, one.n_kv_heads))
    layer: Any = SimpleNamespace(index=0, rows=None, cache=None)
    side._layers = {"layer": layer}
    blocks = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [5, 6, 7]}
    saves = [Save(name, "", 300, True, own, [i] * 300, 256) for i, (name, own) in enumerate(blocks.items())]
    side.begin(StepMessage([Load("a", "", "p", 0, 256, False, blocks["a"])], saves))
    side.start_loads()
    side.before_layer("layer")
    side.after_layer("layer")
    side.settle()
    assert [puts[i].ended for i in range(3)] == ["aborted", "aborted", "committed"]
    assert side.take_invalid() == {1, 2}
    side.close()


def test_the_scheduler_asks_and_does_not_wait() -> None:
    pending = SlowMatch()
    side = asking(pending)

    one = request("1")
    assert side.matched(one, 0) == (None, False)
    assert side.matched(one, 0) == (None, False)
    # A daemon that is away is no reason to wait.
    pending.answered = pending.broken = True
    lost = request("lost")
    assert [side.matched(lost, 0) for _ in range(2)] == [(0, False)] * 2
    pending.broken = False
    pending.answered = True
    assert side.matched(one, 0) == (256, False)
    assert side.matched(one, 128) == (128, False)
    assert side.matched(one, 256) == (0, False)
    assert side.matched(request("2", 257), 0) == (256, False)
    assert side.matched(request("3", 256), 0) == (128, False)  # one token is left to compute
    # Keys that follow from more than token ids are left alone.
    assert side.matched(request("4", lora_request=object()), 0) == (0, False)
    assert side.matched(request("5", mm_features=[1]), 0) == (0, False)
    assert side.matched(request("6", 127), 0) == (0, False)
