"""Runs a model over a store for the evaluation: each document is stored once, then answered from
under many policies without running the question again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import prefixd
from prefixd.evaluate.baselines import WINDOW, BaselineCache, StoredLayer, rope_frequencies
from prefixd.evaluate.methods import ESTIMATORS, METHODS, Cell, budget_tokens, policy
from prefixd.session import Session
from prefixd.transformers import PrefixCache, Splice
from prefixd.transformers.texts import load_encoder

_STATE = ("keys", "values", "is_initialized", "cumulative_length")


class Subject:
    """Holds the model, its text encoding, and the store that it is spliced to."""

    def __init__(
        self, checkpoint: str, directory: Path, *, tokenizer: str = "auto", dtype: str = "auto",
        device: str = "auto", feature_maps: Sequence[Path] = (), l_gen: int = 128,
        selector: str = "exact",
    ) -> None:
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=kind)
        self.model: PreTrainedModel = model.to(self.device).eval().requires_grad_(False)
        self.config = self.model.config.get_text_config(decoder=True)
        self.encoder = load_encoder(tokenizer, checkpoint, self.config)
        self.l_gen, self.selector = l_gen, selector
        with_maps = bool(feature_maps)
        self.store = prefixd.open(
            directory,
            estimators=[e for e in ESTIMATORS if with_maps or not e.startswith("phi")],
            threads=torch.get_num_threads(),
        )
        self.splice = Splice(
            self.store, self.model, feature_maps=feature_maps,
            checkpoint=checkpoint if with_maps else None,
        )
        self.plain = all(x.sliding_window == 0 and x.softcap == 0 for x in self.splice.spec.layers)
        self.frequencies = rope_frequencies(self.model)

    @property
    def limit(self) -> int:
        return int(self.config.max_position_embeddings)

    def count(self, text: str) -> int:
        return len(self.encoder.encode(text))

    def ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.device)

    @torch.no_grad()
    def put(self, tokens: Sequence[int]) -> str:
        """Prefills and stores tokens that are not stored yet and waits for summaries and choices;
        returns the prefix's id."""
        match = self.store.match(self.splice.spec.name, list(tokens))
        if match.n_tokens < len(tokens):
            ids = self.ids(tokens)
            with self.splice.cache(ids) as cache:
                self.model(ids[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1)
            match = self.store.match(self.splice.spec.name, list(tokens))
        self.store.wait_ready(match.prefix)
        return match.prefix

    def close(self) -> None:
        self.store.close()


class Reader:
    """Holds one stored document, with the tokens that follow it run exactly once. Any number of
    readings of the tokens after those can follow, each under another policy or baseline. Use it in
    a `with` block."""

    def __init__(self, subject: Subject, document: Sequence[int], follow: Sequence[int]) -> None:
        self.subject = subject
        self._observed: dict[int, list[Tensor]] = {}
        self._rows: list[StoredLayer] | None = None
        # A cache never attaches to the last token of its prompt.
        prompt = [*document, *follow] if follow else [*document, 0]
        self.cache: PrefixCache = subject.splice.cache(
            subject.ids(prompt), store=False, require=True, exact_prompt=bool(follow),
            policy=prefixd.Policy(mode="full"),
        )
        if not follow:  # without following tokens nothing is known of later reads
            self.cache.prompt_ids = self.cache.prompt_ids[:, : len(document)]
        attached = self.cache.attached[0]
        if attached != len(document):
            raise RuntimeError(f"{attached} of {len(document)} tokens are stored")
        self.n = attached
        if follow:
            self.cache.observe_queries(self._note)
            self._forward(self.cache, follow)
            self.cache.observe_queries(None)
        self._state = [
            {a: getattr(x, a) for a in _STATE if hasattr(x, a)} for x in self.cache.layers
        ]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    @property
    def session(self) -> Session:
        session = self.cache.sessions[0]
        assert session is not None
        return session

    def _note(self, layer: int, query: Tensor) -> None:
        self._observed.setdefault(layer, []).append(query[0].float().cpu())

    def _forward(self, cache: Any, tokens: Sequence[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.subject.model(
                self.subject.ids(tokens), past_key_values=cache
            ).logits[0].float()
        return logits

    def observe(self, tokens: Sequence[int], observer: Callable[[int, Tensor], None]) -> None:
        """Runs `tokens` with full attention; the observer sees their queries."""
        self.session.set_policy(prefixd.Policy(mode="full"))
        self.cache.observe_queries(observer)
        self._forward(self._rewound(), tokens)
        self.cache.observe_queries(None)

    def _rewound(self) -> PrefixCache:
        for layer, state in zip(self.cache.layers, self._state, strict=True):
            for name, value in state.items():
                setattr(layer, name, value)
        return self.cache

    def stored_layers(self) -> list[StoredLayer]:
        """Returns all rows, read back from the store."""
        if self._rows is None:
            spec = self.subject.splice.spec
            self._rows = []
            for index, layer in enumerate(spec.layers):
                heads = [
                    self.session.read_range(index, head, 0, self.n).torch()
                    for head in range(spec.shape(index).n_kv_heads)
                ]
                keys, values = (torch.stack(part).float() for part in zip(*heads, strict=True))
                self._rows.append(StoredLayer(keys, values, layer.scale))
            for index, parts in self._observed.items():
                self._rows[index].observed = torch.cat(parts, 1)[:, -WINDOW:]
                self._rows[index].own_keys = self._state[index]["keys"][0].float().cpu()
        return self._rows

    def _cache(self, cell: Cell) -> Any:
        """Returns the cache for this cell; None where its budget is not feasible."""
        method = METHODS[cell.method]
        if not method.baseline:
            try:
                self.session.set_policy(
                    policy(cell, self.n, self.subject.l_gen, self.subject.selector)
                )
            except prefixd.Infeasible:
                return None
            return self._rewound()
        own = [
            (state["keys"], state["values"]) for state in self._state if state["is_initialized"]
        ]
        return BaselineCache(
            method.baseline, self.stored_layers(), budget_tokens(cell.fraction, self.n), own,
            self.subject.frequencies,
        )

    def read(self, cell: Cell, tokens: Sequence[int]) -> Tensor | None:
        """Returns logits [n, vocab] after each of the given `tokens`; None when infeasible."""
        cache = self._cache(cell)
        return None if cache is None else self._forward(cache, tokens)

    def generate(self, cell: Cell, first: int, most: int, stop: str | None) -> str | None:
        """Returns greedy text after the token `first`, of at most `most` tokens, until `stop`
        occurs."""
        cache = self._cache(cell)
        if cache is None:
            return None
        ends = self.subject.config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        token, out = first, []
        for _ in range(most):
            token = int(self._forward(cache, [token])[-1].argmax())
            if token in ends:
                break
            out.append(token)
            if stop is not None and stop in self.subject.encoder.decode(out):
                break
        return self.subject.encoder.decode(out)
