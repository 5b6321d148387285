"""Holds which session has the stored part of each row of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from prefixd.session import Session


class Rows:
    """Holds the stored part of a batch: each row's session (None: its prompt begins later), and how
    the tokens in memory are placed relative to it."""

    def __init__(
        self,
        sessions: Sequence[Session | None],
        pads: Sequence[int],
        columns: int,
        prompt: int,
        own_window: int | None = None,
    ) -> None:
        self.sessions = list(sessions)
        self.pads = list(pads)
        self.prompts = list(range(len(self.sessions)))  # which of the cache's prompts each row has
        self.columns = columns
        self.prompt = prompt  # columns of the prompt, whose queries attend exactly
        self.own_window = own_window  # tokens that stay in memory behind the stored part
        self.announced = columns  # behind the last column that the model was checked for
        self.derived = any(s is not None and s.info["exact_tokens"] < s.n_tokens for s in sessions)

    def __len__(self) -> int:
        return len(self.sessions)

    def select(self, indices: Sequence[int]) -> None:
        """After an error nothing has changed."""
        chosen = [self.sessions[i] for i in indices]
        dropped: list[Session] = []
        if self.own_window is not None:
            # Sessions have tokens of their own rows: each row needs its own.
            forks: list[Session] = []
            try:
                for at, i in enumerate(indices):
                    session = self.sessions[i]
                    if session is not None and i in indices[:at]:
                        fork = session.fork()
                        forks.append(fork)
                        chosen[at] = fork
            except BaseException:
                for made in forks:
                    made.detach()
                raise
            dropped = [s for i, s in enumerate(self.sessions) if s is not None and i not in indices]
        self.sessions, self.pads = chosen, [self.pads[i] for i in indices]
        self.prompts = [self.prompts[i] for i in indices]
        for session in dropped:
            session.detach()
