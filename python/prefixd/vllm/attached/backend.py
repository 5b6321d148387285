"""vLLM's attention for CPUs, with attached prefixes. For engines without them it is vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from prefixd.errors import FailedPrecondition
from prefixd.vllm.attached.attending import Attending, Batch
from prefixd.vllm.attached.spec import AttachedSpec
from prefixd.vllm.queries import Queries

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec


def attaches(config: VllmConfig) -> bool:
    """Whether this engine has prefixd's connector, and attaches."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != "PrefixdConnector":
        return False
    return transfer.kv_connector_extra_config.get("attach") is True


@dataclass
class AttachedRow:
    """One attached request of a step."""

    marker: int
    first: int  # its queries are rows [first, end) of the batch
    end: int
    length: int  # tokens of the request up to the last query, attached ones too
    blocks: np.ndarray  # of its own tokens; those of tokens that were handed over are others' by now


@dataclass
class AttachedRows:
    rows: list[AttachedRow]
    ordinary: bool  # whether the batch has other requests, too
    batch: Batch | None = None


@dataclass
class AttachedMetadata(CPUAttentionMetadata):
    attached: AttachedRows | None = None


class AttachedBuilder(CPUAttentionMetadataBuilder):
    """Takes the markers out of the block table, so that vLLM's kernels see a request's own tokens alone."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        n = common.num_reqs
        table = common.block_table_tensor
        attached = (table[:n, 0] < 0).nonzero().flatten().tolist()
        if not attached:
            return super().build(common_prefix_len, common, fast_build)
        table, lengths = table.clone(), common.seq_lens.clone()
        starts = common.query_start_loc_cpu.tolist()
        rows = []
        for i in attached:
            markers = int((table[i] < 0).sum())
            marker, length = int(table[i, 0]), int(lengths[i])
            table[i] = torch.roll(table[i], -markers)
            table[i, -markers:] = 0
            own = length - markers * self.block_size
            blocks = table[i, : -(-own // self.block_size)].numpy().copy()
            rows.append(AttachedRow(marker, starts[i], starts[i + 1], length, blocks))
            # What vLLM's kernel makes of it beside ordinary requests is replaced: the least will do.
            lengths[i] = starts[i + 1] - starts[i]
        own = replace(common, block_table_tensor=table, seq_lens=lengths, max_seq_len=int(lengths[:n].max()))
        built = super().build(common_prefix_len, own, fast_build)
        given = {one.name: getattr(built, one.name) for one in fields(CPUAttentionMetadata)}
        return AttachedMetadata(**given, attached=AttachedRows(rows, len(rows) < n))


class AttachedImpl(CPUAttentionBackendImpl):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        AttachedBackend.attaches |= attaches(get_current_vllm_config())

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attached = getattr(attn_metadata, "attached", None)
        if attn_metadata is not None and (queries := Queries.current) is not None:
            n = attn_metadata.num_actual_tokens
            queries.take(layer.layer_name, query[:n].view(n, self.num_heads, self.head_size), attn_metadata)
        if attached is None or attached.ordinary:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if attached is not None and attn_metadata is not None:
            attending = Attending.current
            if attending is None:
                raise FailedPrecondition("a request is attached, and this worker has no connection to prefixd")
            n = attn_metadata.num_actual_tokens
            shape = (n, self.num_heads, self.head_size)
            attending.attend(layer.layer_name, self, query[:n].view(shape), attached, output[:n].view(shape))
        return output


class AttachedBackend(CPUAttentionBackend):
    attaches = False  # in this process

    @staticmethod
    def get_impl_cls() -> type[AttachedImpl]:
        return AttachedImpl

    @staticmethod
    def get_builder_cls() -> type[AttachedBuilder]:
        return AttachedBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if not cls.attaches or type(spec) is not FullAttentionSpec:
            return spec
        return AttachedSpec(**{one.name: getattr(spec, one.name) for one in fields(spec)})
