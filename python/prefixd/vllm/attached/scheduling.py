"""Decides in the scheduler's process which requests are attached, and refuses those that would wait for
ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from prefixd.errors import FailedPrecondition, InvalidArgument
from prefixd.vllm.attached import policy
from prefixd.vllm.attached.spec import AttachedManager
from prefixd.vllm.messages import NEVER, Attachment

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.prefixd")


class Attaching:
    """`default` is the policy of requests that have none; prefixes below `least` tokens are loaded; of the
    tokens that a request computes behind its prefix the last `own_window` keep blocks (0: all do)."""

    def __init__(self, default: Mapping[str, Any], least: int, own_window: int, block_tokens: int) -> None:
        policy.check(default, "'policy' of kv_connector_extra_config")
        self._default = default
        self._least = least
        self._own_window = own_window
        self._block = block_tokens
        self._blocks = 0  # of the pool
        self._claims: dict[str, int] = {}
        self._wanted: dict[str, Attachment] = {}
        self._attached: dict[str, Attachment] = {}
        self._handing: dict[str, int] = {}  # as the manager has it
        self._new: list[Attachment] = []  # of the next step

    def bind(self, manager: KVCacheManager) -> None:
        (own,) = manager.coordinator.single_type_managers
        if not isinstance(own, AttachedManager):
            raise FailedPrecondition(
                "the engine has its own block manager, so that nothing can be attached: vLLM has not loaded prefixd's "
                "plugin. Install the wheel, or have its directory on PYTHONPATH (and 'prefixd' in VLLM_PLUGINS, "
                "where that is set)"
            )
        own.claims, own.handing, own.own_window = self._claims, self._handing, self._own_window
        self._blocks = manager.kv_cache_config.num_blocks - 1  # one is the null block
        # The window may begin and end within a block.
        if self._own_window > (self._blocks - 2) * self._block:
            raise InvalidArgument(
                f"own_window is {self._own_window} tokens, and the engine's cache has {self._blocks * self._block}: "
                f"at most {max(self._blocks - 2, 0) * self._block}, so that a request can go on"
            )

    def decide(self, request: Request, computed: int, found: int, parked: bool) -> tuple[int, bool]:
        """Gets what the connector would load behind the first `computed` tokens, and returns what vLLM is
        told instead."""
        name = request.request_id
        self._claims.pop(name, None)
        self._wanted.pop(name, None)
        whole = self._whole(request.num_tokens - 1)
        try:
            own = policy.read(request.kv_transfer_params, self._default)
        except InvalidArgument as error:
            return self._refuse(request, computed, whole, str(error), (found, parked))
        # A request that skips cached tokens (its prompt_logprobs are of all of them) has every token computed:
        # vLLM takes our answer for 0.
        may = own.attach and not request.skip_reading_prefix_cache
        attached = computed + found if may and found > 0 and computed + found >= self._least else 0
        if -(-request.num_tokens // self._block) - attached // self._block > self._blocks:
            needed = f"{request.num_tokens - attached} tokens"
            if attached:
                needed += f" behind its attached prefix of {attached}"
            reason = f"its {needed} do not fit the engine's cache of {self._blocks * self._block}"
            return self._refuse(request, computed, whole, reason, (found, parked))
        if not attached:
            return found, parked
        self._claims[name] = attached
        self._wanted[name] = self._attachment(request, attached, own.policy)
        return found, False

    def _attachment(self, request: Request, tokens: int, own: Mapping[str, Any], refused: str = "") -> Attachment:
        name, prompt = request.request_id, request.num_prompt_tokens
        # What a session's next input makes of handed-over tokens was not tried: all of it keeps its blocks.
        known = NEVER if request.resumable else request.num_tokens
        return Attachment(name, "", tokens, prompt, known, dict(own), 0, refused)

    def _whole(self, tokens: int) -> int:
        return tokens // self._block * self._block

    def _refuse(
        self, request: Request, computed: int, whole: int, reason: str, otherwise: tuple[int, bool]
    ) -> tuple[int, bool]:
        """vLLM has no way to refuse a request here. It is attached to nothing, which fails it alone in its
        first step."""
        if whole <= computed:
            logger.warning("prefixd: request %s: %s", request.request_id, reason)
            return otherwise
        name = request.request_id
        request.skip_reading_prefix_cache = False  # vLLM looks at it behind our answer, and would drop that
        self._claims[name] = whole
        self._wanted[name] = self._attachment(request, whole, {}, refused=reason)
        return whole - computed, False

    def allocated(self, request: Request, blocks: list[int], external: int) -> Attachment | None:
        """Returns the attachment of a request that got its blocks; None: it is not attached."""
        name = request.request_id
        wanted = self._wanted.pop(name, None)
        self._attached.pop(name, None)
        self._handing.pop(name, None)
        if wanted is None or external <= 0:
            return None
        wanted.marker = blocks[0]
        self._new.append(wanted)
        self._attached[name] = wanted
        return wanted

    def scheduled(self, output: SchedulerOutput) -> None:
        """Notes which requests hand tokens over from this step on, as their worker sees it."""
        if self._own_window == 0:
            return
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, n in output.num_scheduled_tokens.items():
            one = self._attached.get(name)
            if one is not None and name not in self._handing and one.hands_over(computed[name] + n, n):
                self._handing[name] = computed[name] + n

    def take_new(self) -> list[Attachment]:
        taken, self._new = self._new, []
        return taken

    def finished(self, request: str) -> None:
        for kept in (self._claims, self._wanted, self._attached, self._handing):
            kept.pop(request, None)
