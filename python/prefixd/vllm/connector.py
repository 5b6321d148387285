"""PrefixdConnector: what vLLM calls, in the scheduler's process and in each worker's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from prefixd.errors import InvalidArgument
from prefixd.vllm.attached.attending import Attending
from prefixd.vllm.attached.scheduling import Attaching
from prefixd.vllm.daemon import Daemon
from prefixd.vllm.identity import describe
from prefixd.vllm.messages import StepMessage
from prefixd.vllm.options import Options, check_role
from prefixd.vllm.scheduler import SchedulerSide
from prefixd.vllm.stats import Counts
from prefixd.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.prefixd")


class PrefixdConnector(KVConnectorBase_V1):
    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        check_role(transfer.kv_role)
        options = Options.read(transfer.kv_connector_extra_config)
        if options.attach and transfer.kv_load_failure_policy == "recompute":
            raise InvalidArgument(
                'with "attach", kv_load_failure_policy is "fail": a request without blocks cannot be computed again '
                "in place. One whose prefix is lost fails alone, and is computed when it comes again"
            )
        ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        if options.own_window and ranks > 1:
            raise InvalidArgument(
                f"own_window is for engines of one rank, and this one has {ranks}: a session that has a part of the "
                "heads cannot move its tokens to the store. Leave it out"
            )
        spec = describe(vllm_config, options.weights)
        block_tokens = int(vllm_config.cache_config.block_size)
        self._daemon = Daemon(options)
        line = self._daemon.line(rows=role == KVConnectorRole.WORKER)
        self._daemon.greet(line, spec)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._attaching: Attaching | None = None
        self._attending: Attending | None = None
        if role == KVConnectorRole.SCHEDULER:
            if options.attach:
                self._attaching = Attaching(
                    options.policy or {}, options.attach_tokens, options.own_window, block_tokens
                )
            self._scheduler = SchedulerSide(line, spec, options, block_tokens)
            logger.info("prefixd: prompts of model %s are kept by %s", spec.name, self._daemon.address)
            if transfer.kv_load_failure_policy != "recompute" and not options.attach:
                logger.warning(
                    'prefixd: a request whose stored rows cannot be read fails; with "kv_load_failure_policy": '
                    '"recompute" vLLM computes them again'
                )
        else:
            own = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
            heads = (get_tensor_model_parallel_rank() * own, own)
            self._worker = WorkerSide(line, self._daemon.line(rows=True), spec, options, block_tokens, heads)
            if options.attach:
                self._attending = Attending(line, spec, heads, options.own_window, options.own_memory_tokens)

    @property
    def _in_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _in_worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def shutdown(self) -> None:
        if self._attending is not None:
            self._attending.close()
        if self._worker is not None:
            self._worker.close()
        self._daemon.close()

    # ---- the scheduler's process ----

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._attaching is not None:
            self._attaching.bind(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        found, parked = self._in_scheduler.matched(request, num_computed_tokens)
        if self._attaching is None or found is None:
            return found, parked
        return self._attaching.decide(request, num_computed_tokens, found, parked)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        ids = list(blocks.get_block_ids()[0])
        if self._attaching is not None and (attached := self._attaching.allocated(request, ids, num_external_tokens)):
            attached.prefix = self._in_scheduler.handed_over(request)
        else:
            self._in_scheduler.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        message = self._in_scheduler.message(scheduler_output)
        if self._attaching is not None:
            message.attached = self._attaching.take_new()
            self._attaching.scheduled(scheduler_output)
        return message

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._in_scheduler.worked(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._in_scheduler.finished(request.request_id)
        if self._attaching is not None:
            self._attaching.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """False: vLLM takes anything else for a store that is empty now."""
        logger.warning(
            "prefixd: what is stored stays, because other engines may use it; 'prefixctl prefixes remove' removes it. "
            "After a change of weights, end this engine and start another, which stores under their fingerprint"
        )
        return False

    # ---- a worker's process ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from prefixd.vllm.attached.backend import AttachedImpl

        layers = self._vllm_config.compilation_config.static_forward_context
        self._in_worker.register(kv_caches, layers)
        if self._in_worker.stores and not all(isinstance(layers[name].impl, AttachedImpl) for name in kv_caches):
            logger.warning(
                "prefixd: prompts are stored without queries, and read worse under a budget, because vLLM has not "
                "loaded prefixd's plugin: install the wheel, or put its directory on PYTHONPATH (and 'prefixd' in "
                "VLLM_PLUGINS, where that is set)"
            )
        if self._attending is not None:
            self._attending.register(self._in_worker.layers, layers)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMessage)
        self._in_worker.begin(connector_metadata)
        if self._attending is not None:
            self._attending.begin(connector_metadata.attached)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._in_worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._in_worker.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self._in_worker.after_layer(layer_name)

    def wait_for_save(self) -> None:
        self._in_worker.settle()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._in_worker.finished(finished_req_ids)
        if self._attending is not None:
            self._attending.finished(finished_req_ids)
        return None, self._in_worker.take_parked()

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid = self._in_worker.take_invalid()
        return invalid if self._attending is None else invalid | self._attending.take_failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._in_worker.note()

    # ---- counts ----

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is None:
            return self._in_scheduler.take_counts()
        counts = self._worker.take_counts()
        if self._attending is None:
            return counts
        attended = self._attending.take_counts()  # on every rank, because it drops the reports that have come
        if get_tensor_model_parallel_rank() > 0:
            return None  # the first rank counts for all
        if counts is not None:
            attended.aggregate(counts)
        return None if attended.is_empty() else attended

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return Counts.of(data)
