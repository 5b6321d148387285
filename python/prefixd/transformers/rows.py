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
        self.columns = columns
        self.prompt = prompt  # columns of the prompt, whose queries attend exactly
        self.own_window = own_window  # tokens that stay in memory behind the stored part
        self.announced = columns  # behind the last column that the model was checked for
        self.derived = any(s is not None and s.info["exact_tokens"] < s.n_tokens for s in sessions)

    def __len__(self) -> int:
        return len(self.sessions)

    def select(self, indices: Sequence[int]) -> None:
        if self.own_window is None:
            self.sessions = [self.sessions[i] for i in indices]
        else:
            # Sessions have tokens of their own rows: each row needs its own.
            before, taken = self.sessions, set[int]()
            self.sessions = []
            for i in indices:
                session = before[i]
                self.sessions.append(session.fork() if session is not None and i in taken else session)
                taken.add(i)
            for i, session in enumerate(before):
                if session is not None and i not in taken:
                    session.detach()
        self.pads = [self.pads[i] for i in indices]
