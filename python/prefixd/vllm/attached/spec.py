"""The cache spec and the block manager of attached requests. Importing this module registers them: the
engine's core imports it with the first spec that a worker sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


@dataclass(frozen=True, kw_only=True)
class AttachedSpec(FullAttentionSpec):
    """Has no fields of its own, because vLLM makes merged specs from those it knows."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """What vLLM compares with the pool at the start. A prompt of the longest length may be attached,
        and then needs blocks for its last tokens alone; those that need more than there is are refused
        when they come (scheduling.py)."""
        return min(int(super().max_memory_usage_bytes(vllm_config)), 2 * int(self.page_size_bytes))


class AttachedManager(FullAttentionManager):
    """Gives attached tokens markers instead of blocks. The connector sets `claims` before it answers how
    many tokens of a request it has; they hold when vLLM takes that answer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.claims: dict[str, int] = {}  # request -> its attached tokens, whole blocks
        self.own_window = 0  # own tokens that keep blocks while a request generates; 0: all do
        # Request -> its length behind the first step that handed tokens over; all later ones do.
        self.handing: dict[str, int] = {}
        self._skipped = 0  # of the request that is asked for just now
        self._markers: dict[str, int] = {}  # of the requests that have blocks
        self._unused: list[int] = []

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return self._skipped

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        external = request_id not in self.num_cached_block and total_computed_tokens > num_local_computed_tokens
        self._skipped = self.claims.get(request_id, 0) if external else 0
        try:
            return int(
                super().get_num_blocks_to_allocate(
                    request_id,
                    num_tokens,
                    new_computed_blocks,
                    total_computed_tokens,
                    num_local_computed_tokens,
                    num_tokens_main_model,
                    apply_admission_cap=apply_admission_cap,
                    prefill_end=prefill_end,
                )
            )
        finally:
            self._skipped = 0

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        self._skipped = self.claims.get(request_id, 0) if num_external_computed_tokens > 0 else 0
        skipped = self._skipped // self.block_size
        try:
            super().add_local_computed_blocks(
                request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
            )
        finally:
            self._skipped = 0
        if skipped:
            # No other request has the number, so that a worker knows the request by it, and vLLM fails
            # this one alone when a worker reports it.
            number = self._unused.pop() if self._unused else len(self._markers) + 1
            self._markers[request_id] = number
            self.req_to_blocks[request_id][:skipped] = [KVCacheBlock(block_id=-number, is_null=True)] * skipped

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        if request_id not in self._markers:
            super().allocate_external_computed_blocks(
                request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing
            )

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Blocks behind an attached prefix may have been computed behind an approximate step, and no other
        request gets them."""
        if request.request_id not in self._markers:
            super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Gives back the blocks of tokens that the request's session has: all but the last `own_window` of those that
        were computed in steps that have ended."""
        super().remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)
        begun = self.handing.get(request_id)
        if begun is None or processed_computed_tokens < begun or request_id not in self._markers:
            return
        blocks, freed = self.req_to_blocks[request_id], []
        end = min((processed_computed_tokens - self.own_window) // self.block_size, len(blocks))
        for i in range(end - 1, -1, -1):
            if blocks[i].block_id < 0:
                break
            freed.append(blocks[i])
            blocks[i] = blocks[0]
        self.block_pool.free_blocks(freed)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        if (number := self._markers.pop(request_id, None)) is not None:
            self._unused.append(number)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return [block for block in blocks if block.block_id >= 0]


# A registry that is not empty counts as complete.
register_all_kvcache_specs(None)
KVCacheSpecRegistry.register(AttachedSpec, AttachedManager, uniform_type_base_spec=FullAttentionSpec)
