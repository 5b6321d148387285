"""The connector in the scheduler's process: finds stored prompts, and says with each step what is
loaded and stored. Nothing here waits for disk or daemon."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from prefixd.errors import DeadlineExceeded, NotFound, PrefixdError, ResourceExhausted
from prefixd.estimate import EngineSpeed
from prefixd.model import ModelSpec
from prefixd.salts import token_ids
from prefixd.store import PendingMatch, PrefixMatch
from prefixd.vllm.messages import Load, Save, StepMessage, WorkerNote
from prefixd.vllm.options import Options
from prefixd.vllm.parameters import stores
from prefixd.vllm.reach import Line
from prefixd.vllm.stats import Counts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.prefixd")


# Puts of a worker that are not finished, at most. A daemon takes 16 of a connection (limits.max_puts), and an
# aborted one counts until it has heard of it.
MAX_PUTS = 12


@dataclass
class _Asked:
    pending: PendingMatch | None = None
    waiting: bool = True  # for room for a match
    since: float = field(default_factory=time.monotonic)
    unanswered: float = field(default_factory=time.monotonic)  # when it was last looked at in vain
    answer: PrefixMatch | None = None
    computed: int = 0  # tokens that vLLM had itself when it asked last
    parked: bool = False
    computes: bool = False  # because that is faster


@dataclass
class _Saving:
    tokens: np.ndarray  # as they are stored
    digest: bytes  # of the tokens
    told: bool = False  # whether the worker has the tokens
    blocks: list[int] = field(default_factory=list)  # as the worker was told last


class SchedulerSide:
    def __init__(self, line: Line, spec: ModelSpec, options: Options, block_tokens: int) -> None:
        self._line = line
        self._spec = spec
        self._options = options
        self._block = block_tokens
        self._asked: dict[str, _Asked] = {}
        self._loads: dict[str, Load] = {}  # of the next step
        self._parked: list[Load] = []  # of the next step, of requests that wait for them
        self._counts = Counts()
        self._said = False  # that a prompt is computed because that is faster
        self._given_up: set[str] = set()  # requests that a load has failed
        self._loaded: dict[str, Load] = {}  # of the last steps, until the request ends
        self._prompts: dict[str, _Saving] = {}  # of requests that are stored, until they end
        self._saving: dict[str, _Saving] = {}  # those that the worker does not have completely yet
        self._storing: set[bytes] = set()  # the digests of all of them
        self._puts = 0  # that a worker has not finished
        # Blocks that a failed load has left wrong, until they are computed again. vLLM's prefix cache goes on
        # giving them to requests meanwhile.
        self._wrong: set[int] = set()

    # ---- finding ----

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Returns how many tokens behind the first `computed` can be loaded (None: ask again), and
        whether the request waits for them while others run."""
        if not self._options.load or not self._serves(request) or request.request_id in self._given_up:
            return 0, False
        if self._line.reach.away:  # what was asked of it is not waited for
            self._asked.pop(request.request_id, None)
            return 0, False
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._asked[request.request_id] = _Asked()
        if asked.waiting:
            self._ask(request, computed, asked)
            if asked.waiting:
                return None, False
        if asked.answer is None and asked.pending is not None:
            if not asked.pending.ready():
                asked.unanswered = time.monotonic()
                return None, False
            asked.answer, asked.pending = self._answer(asked.pending, asked.unanswered - asked.since), None
        asked.computed = computed
        if asked.answer is None:
            return 0, False
        # vLLM takes whole blocks, and computes one token at least.
        usable = min(asked.answer.n_tokens, request.num_tokens - 1) // self._block * self._block
        found = usable - computed
        if found < max(self._block, self._options.min_tokens):
            return 0, False
        if self._computes(asked, found):
            return 0, False
        asked.parked = 0 < self._options.park_tokens <= found
        return found, asked.parked

    def _serves(self, request: Request) -> bool:
        """Whether the prompt's keys follow from the model and its token ids alone."""
        return (
            request.prompt_token_ids is not None
            and request.lora_request is None
            and not request.mm_features
            and request.prompt_embeds is None
            and request.num_prompt_tokens >= max(self._block, self._options.min_tokens)
        )

    def _computes(self, asked: _Asked, found: int) -> bool:
        """Whether computing is estimated to be faster than loading. What is attached is so for the blocks that
        it leaves to others, whatever takes longer."""
        if asked.computes or asked.answer is None or not self._options.compute_when_faster or self._options.attach:
            return asked.computes
        estimate = asked.answer.estimate
        if estimate.advice != "recompute":
            return False
        asked.computes = True
        self._counts.add(computed_instead=1, computed_instead_tokens=found)
        if not self._said:
            self._said = True
            logger.info(
                "prefixd: a stored prompt is computed, because that is faster: %.3g s for %d tokens at %.0f a second "
                "(%s), and %.3g s to load them (%s); the metrics count further ones",
                estimate.recompute.seconds,
                estimate.tokens,
                estimate.prefill_tokens_per_second,
                estimate.recompute.source,
                estimate.restore.seconds,
                estimate.restore.source,
            )
        return True

    def take_counts(self) -> Counts | None:
        """Returns what happened since the last call."""
        taken, self._counts = self._counts, Counts()
        return None if taken.is_empty() else taken

    def _ask(self, request: Request, computed: int, asked: _Asked) -> None:
        """Begins a match, or leaves it waiting while there are too many."""
        asked.waiting = False
        try:
            with self._line.call() as store:
                asked.pending = store.match_async(
                    self._spec.name,
                    token_ids(list(request.all_token_ids), request.cache_salt),
                    deadline=self._options.match_seconds,
                    engine=EngineSpeed(self._options.prefill_tokens_per_second, computed),
                )
        except ResourceExhausted as error:
            asked.waiting = time.monotonic() - asked.since < self._options.match_seconds
            if not asked.waiting:
                self._failed(error)
        except PrefixdError as error:
            self._failed(error)

    def _answer(self, pending: PendingMatch, waited: float) -> PrefixMatch | None:
        """`waited`: at least so long it took, which may have been noticed long after."""
        try:
            match = pending.result()
        except NotFound:  # nothing was stored for this model
            return None
        except PrefixdError as error:
            self._failed(error)
            if isinstance(error, DeadlineExceeded):
                waited = self._options.match_seconds
            self._line.reach.failed(error, waited)
            return None
        return match if match.prefix else None

    def _failed(self, error: PrefixdError) -> None:
        logger.warning("prefixd: a prompt is computed without a look at what is stored: %s", error)

    # ---- steps ----

    def allocated(self, request: Request, blocks: list[int], external: int) -> None:
        asked = self._asked.pop(request.request_id, None)
        if external > 0 and asked is not None and asked.answer is not None:
            begin, end = asked.computed, asked.computed + external
            load = Load(request.request_id, asked.answer.prefix, begin, end, asked.parked, blocks)
            if load.parked:
                self._parked.append(load)
            else:
                self._loads[request.request_id] = load
        if self._line.reach.away and self._serves(request):
            self._counts.add(unreachable_prompts=1)
        # Behind markers of an attached prefix (attached/), rows may come of approximate steps: a session that gets
        # more input is allocated blocks again.
        attached = bool(blocks) and blocks[0] < 0
        wanted = self._options.store and stores(request.kv_transfer_params)
        stored = wanted and self._serves(request) and not attached
        if stored and request.request_id not in self._prompts:
            self._begin_saving(request)

    def _begin_saving(self, request: Request) -> None:
        """Has the prompt stored, unless another request of the engine is storing it."""
        tokens = token_ids(request.prompt_token_ids or (), request.cache_salt)
        digest = hashlib.blake2b(tokens.data, digest_size=32).digest()
        if digest not in self._storing:
            self._storing.add(digest)
            self._prompts[request.request_id] = self._saving[request.request_id] = _Saving(tokens, digest)

    def _end_saving(self, request: str) -> None:
        self._saving.pop(request, None)
        if prompt := self._prompts.pop(request, None):
            self._storing.discard(prompt.digest)

    def handed_over(self, request: Request) -> str:
        """Returns the prefix of a request that is attached: nothing of it is loaded or stored."""
        asked = self._asked.pop(request.request_id, None)
        self._end_saving(request.request_id)
        return asked.answer.prefix if asked is not None and asked.answer is not None else ""

    def message(self, output: SchedulerOutput) -> StepMessage:
        message = StepMessage()
        message.loads, self._parked = self._parked, []
        # The blocks of who was preempted are others' by now.
        for request in (output.preempted_req_ids or set()) - output.num_scheduled_tokens.keys():
            self._loaded.pop(request, None)
            if prompt := self._prompts.get(request):
                prompt.blocks = []
        self._loaded.update((load.request, load) for load in message.loads)
        state = output.kv_connector_block_state
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        if self._wrong and state is not None:
            message.wrong = self._mend(output, computed, message.loads)
        # A prompt for which there is no room waits: its rows stay in its blocks while the request runs.
        room = 0 if self._line.reach.away else MAX_PUTS - self._puts
        for request, n in output.num_scheduled_tokens.items():
            load, saving = self._loads.pop(request, None), self._saving.get(request)
            if saving is not None and not saving.told and room <= 0:
                saving = None
            if load is None and saving is None:
                continue
            tables = state.get_block_ids(request) if state is not None else None
            if tables is None:
                continue
            blocks = list(tables[0])
            if load is not None:
                load.blocks = blocks
                self._loaded[request] = load
                message.loads.append(load)
            # What is computed over wrong rows is computed again, and stored then.
            over_wrong = self._wrong and not self._wrong.isdisjoint(blocks[: computed[request] // self._block])
            if saving is not None and not over_wrong:
                end = min(computed[request] + n, len(saving.tokens))
                last = end == len(saving.tokens)
                tokens = None if saving.told else saving.tokens
                room -= not saving.told
                message.saves.append(Save(request, end, last, blocks, tokens, min(computed[request], end)))
                saving.told, saving.blocks = True, blocks
                if last:
                    del self._saving[request]
        return message

    def _mend(self, output: SchedulerOutput, computed: dict[str, int], parked: list[Load]) -> list[int]:
        """Takes blocks for right again that this step loads, or computes to their end behind right ones.
        Returns the wrong ones over which it computes: who was to compute them again has ended since, or is
        behind, or vLLM's prefix cache gave them to another request."""
        for one in parked:
            self._wrong.difference_update(one.blocks[one.begin // self._block : one.end // self._block])
        used: set[int] = set()
        for request, n in output.num_scheduled_tokens.items():
            tables = output.kv_connector_block_state.get_block_ids(request)
            if tables is None:
                continue
            load = self._loads.get(request)
            first = computed[request] if load is None else load.begin
            before, last = first // self._block, computed[request] + n
            if wrong := self._wrong.intersection(tables[0][:before]):
                used |= wrong
                self._wrong.update(tables[0][before : -(-last // self._block)])
            else:
                self._wrong.difference_update(tables[0][before : last // self._block])
        return sorted(used)

    def worked(self, output: KVConnectorOutput) -> None:
        """vLLM computes again what could not be loaded, and what was computed over it; then it is stored."""
        note = output.kv_connector_worker_meta
        if isinstance(note, WorkerNote):
            self._puts = note.puts
            if note.lost:
                self._line.reach.lose("a worker had no answer")
        invalid = {block for block in output.invalid_block_ids or () if block >= 0}  # markers are below (spec.py)
        if not invalid:
            return
        again = set()
        for request, load in list(self._loaded.items()):
            if not invalid.isdisjoint(load.blocks):
                del self._loaded[request]
                self._given_up.add(request)
                self._doubt(load.blocks, invalid)
                again.add(request)
        for request, prompt in self._prompts.items():
            if request in again or not invalid.isdisjoint(prompt.blocks):
                self._doubt(prompt.blocks, invalid)
                prompt.told = False
                self._saving[request] = prompt

    def _doubt(self, blocks: list[int], invalid: set[int]) -> None:
        """What was computed behind the first invalid block is wrong, too."""
        first = next((i for i, block in enumerate(blocks) if block in invalid), len(blocks))
        self._wrong.update(blocks[first:])

    def finished(self, request: str) -> None:
        for kept in (self._asked, self._loads, self._loaded):
            kept.pop(request, None)
        self._end_saving(request)
        self._given_up.discard(request)
