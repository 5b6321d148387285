"""Reads what the user says in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from prefixd.errors import InvalidArgument

# What may be given for a default of each type.
_TYPES: dict[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (float, int), tuple: (tuple,)}
_TYPES[type(None)] = (dict,)


@dataclass(frozen=True)
class Options:
    prefixd: str  # a daemon's address ("unix:...", "tcp:...", "tls:..."), or a directory: a daemon is started there
    tenant: str = ""  # whose prompts; "" as the daemon says
    token: str = ""  # where the daemon requires one
    store: bool = True  # store prompts
    load: bool = True  # load stored ones
    min_tokens: int = 0  # load and store only from so many tokens on
    park_tokens: int = 0  # loads of so many tokens are parked, and others run meanwhile; 0: none
    match_seconds: float = 10.0  # a prompt is computed when it is not found within this time
    call_seconds: float = 10.0  # a call to the daemon that takes longer counts as failed
    commit_seconds: float = 60.0  # so does a commit, which takes as long as the disk does
    load_mib: int = 128  # the buffers of all loads of a step together
    compute_when_faster: bool = True  # compute a stored prompt where loading it is estimated to take longer
    prefill_tokens_per_second: float = 0.0  # of this engine, for that estimate; 0: as its puts have shown
    weights: str = ""  # names the weights, instead of a digest of their files
    attach: bool = False  # attend over stored prefixes where they are, instead of loading them
    attach_tokens: int = 2048  # prefixes below are loaded
    policy: Mapping[str, Any] | None = None  # of attached requests that have none (docs/policy.md)
    daemon: tuple[str, ...] = ()  # further arguments of a daemon that is started

    @property
    def directory(self) -> str | None:
        return None if self.prefixd.startswith(("unix:", "tcp:", "tls:")) else self.prefixd

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        known = {field.name: field for field in fields(cls)}
        if unknown := sorted(set(given) - set(known)):
            raise InvalidArgument(
                f"kv_connector_extra_config has no '{unknown[0]}'; prefixd takes {', '.join(known)}"
            )
        if not given.get("prefixd"):
            raise InvalidArgument(
                "kv_connector_extra_config needs 'prefixd': the address of a daemon (unix:/path, tcp:host:port, "
                "tls:host:port), or a directory, in which one is started"
            )
        if not isinstance(given.get("daemon", ()), (list, tuple)):
            raise InvalidArgument(
                f"'daemon' of kv_connector_extra_config is a list of arguments, not {given['daemon']!r}"
            )
        values = {**given, "daemon": tuple(str(argument) for argument in given.get("daemon", ()))}
        for name, value in values.items():
            wanted = _TYPES[type(known[name].default)] if name != "prefixd" else (str,)
            if type(value) not in wanted:
                raise InvalidArgument(f"'{name}' of kv_connector_extra_config cannot be {value!r}")
        options = cls(**values)
        least = (
            options.min_tokens,
            options.park_tokens,
            options.match_seconds,
            options.attach_tokens,
            options.prefill_tokens_per_second,
        )
        if min(least) < 0 or min(options.call_seconds, options.commit_seconds, options.load_mib) <= 0:
            raise InvalidArgument(
                "min_tokens, park_tokens, attach_tokens, match_seconds and prefill_tokens_per_second are 0 or more, "
                "call_seconds, commit_seconds and load_mib are above 0"
            )
        _agree(options, given)
        return options


def _agree(options: Options, given: Mapping[str, Any]) -> None:
    """Refuses options that would have no effect beside the others."""
    if options.attach and not options.load:
        raise InvalidArgument('"attach" needs "load": what is not looked for cannot be attached')
    for name in ("attach_tokens", "policy"):
        if name in given and not options.attach:
            raise InvalidArgument(f'"{name}" is of attached prefixes: it needs "attach": true')


def check_role(role: str | None) -> None:
    """vLLM's roles split an engine in two, of which each would do the half of what the connector does."""
    if role != "kv_both":
        raise InvalidArgument(
            f'kv_role is {role!r}, and the connector knows "kv_both" alone; "store": false or "load": false in '
            "kv_connector_extra_config makes an engine that only loads or only stores"
        )
